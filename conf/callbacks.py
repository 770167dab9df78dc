"""Hydra's callbacks: what a finished job leaves behind, and how a sweep ends."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.core.utils import JobStatus as HydraStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.schema import is_recording_rank
from pipeline.training.failures import RunFailure

_log = logging.getLogger(__name__)
_FILE = "status.json"


class BadInput(ValueError):
    """What the user asked for can't be: one line with the value and the cure, and exit status 2."""


class JobStatus(Callback):
    """Says and notes how each job ended. A failed job of a sweep doesn't stop the others; the sweep then names it.

    What is needed at the end is read from the sweep's directory: under a parallel launcher jobs run in other processes.
    """

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write status.json. A failed single run ends the program; in a sweep Hydra is told to go on.

        Raises:
            SystemExit: after a failed single run, with status 2 for bad input and 1 for the rest.
        """
        error = job_return._return_value if job_return.status is HydraStatus.FAILED else None
        hydra = HydraConfig.get()
        sweeping = hydra.mode is RunMode.MULTIRUN
        if is_recording_rank():
            _write_status(Path(hydra.runtime.output_dir), hydra.job.num if sweeping else 0, job_return, error)
        if error is None:
            return
        if not _told_elsewhere(error):
            _show(error)
        if not sweeping:
            raise SystemExit(2 if isinstance(error, BadInput) else 1)
        job_return.status = HydraStatus.COMPLETED
        job_return.return_value = None

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Say how many jobs went well.

        Raises:
            SystemExit: with status 1 when a job failed.
        """
        found = sorted(Path(config.hydra.sweep.dir).glob(f"*/{_FILE}"), key=lambda file: int(file.parent.name))
        jobs = [json.loads(file.read_text()) for file in found]
        failed = [job for job in jobs if job["status"] == "failed"]
        _report(Path(config.hydra.sweep.dir), len(jobs))
        print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished: {config.hydra.sweep.dir}")
        everywhere = set.intersection(*(set(job["overrides"]) for job in jobs)) if jobs[1:] else set()
        for job in failed:
            own = [override for override in job["overrides"] if override not in everywhere]
            print(f"job {job['job']} ({' '.join(own)}) failed: {job['error']}")
        if failed:
            raise SystemExit(1)


def _write_status(directory: Path, number: int, job_return: JobReturn, error: BaseException | None) -> None:
    status = {
        "job": number,
        "overrides": list(job_return.overrides or ()),
        "status": "finished" if error is None else "failed",
        "error": None if error is None else (str(error).splitlines() or [type(error).__name__])[0],
    }
    (directory / _FILE).write_text(json.dumps(status, indent=2) + "\n")


def _report(sweep: Path, jobs: int) -> None:
    """What the sweep's runs or plans say side by side. Whatever becomes of it, the sweep's end is said."""
    if jobs < 2 or not is_recording_rank():
        return
    from rich.console import Console  # with the report: only sweeps wait for them

    from pipeline.report.write import write_report

    try:
        write_report([sweep], sweep, Console())
    except ValueError as error:
        _log.warning("no comparison: %s", error)
    except Exception:
        _log.warning("the runs could not be compared; python -m pipeline.report %s tries again", sweep, exc_info=True)


def _told_elsewhere(error: BaseException) -> bool:
    """Whether another rank of an outer launcher says it: what they all say is rank 0's to say."""
    if isinstance(error, BadInput):
        return not is_recording_rank()
    return isinstance(error, RunFailure) and error.told


def _show(error: BaseException) -> None:
    """On the terminal and in the log, once: one line for bad input, a rank's failure as it was reported, else all."""
    complete = isinstance(error, BadInput | RunFailure)
    _log.error("%s", error, exc_info=None if complete and "HYDRA_FULL_ERROR" not in os.environ else error)

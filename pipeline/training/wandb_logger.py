"""Weights & Biases: one run a job. The only file that imports wandb, and only once a run starts.

Nothing here may hold training up or take it down. Without an API key the run is written offline; with one but without
a server, init gives up after INIT_SECONDS and the run is written offline; any other error is one warning.
"""

from __future__ import annotations

import logging
import netrc
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.training.messages import StepMetrics, ValidationMetrics
from pipeline.training.recorder import RunFacts

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")
INIT_SECONDS = 5.0
FINISH_SECONDS = 15.0
_REASON_LENGTH = 80
_KILLED = 255  # the exit code that W&B shows as "killed" instead of "failed"


class WandbLogger:
    """A Sink that keeps a W&B run in `<run directory>/wandb`.

    `mode`: "auto" does as WANDB_MODE says, else goes online where there is an API key (environment or netrc) and
    writes an offline run where there is none; "online", "offline" and "disabled" override WANDB_MODE. `tags` join
    the schedule and the model. Raises ValueError for another mode.
    """

    def __init__(
        self,
        *,
        project: str = "stagecraft",
        mode: str = "auto",
        group: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"logger.mode={mode} is unknown: use {', '.join(MODES[:-1])} or {MODES[-1]}")
        self._project, self._group, self._name, self._tags = project, group, name, tuple(tags)
        self._mode = mode if mode != "auto" else os.environ.get("WANDB_MODE") or "auto"
        self._run: wandb.Run | None = None
        self._facts: RunFacts | None = None
        self._directory = Path()
        self._step = 0
        self._warned = False

    def start(self, facts: RunFacts, directory: Path) -> None:
        """Open the run; at most about INIT_SECONDS where the server doesn't answer."""
        if self._mode == "disabled":
            return
        self._facts, self._directory = facts, directory
        try:
            self._open()
        except ImportError:
            self._warn("wandb is not installed (use pip install wandb, or logger=none)")
        except Exception as error:
            self._warn(_reason(error))

    def log_step(self, metrics: StepMetrics) -> None:
        values = {
            "loss": metrics.loss,
            "gradient_norm": metrics.gradient_norm,
            "learning_rate": metrics.learning_rate,
            "step_seconds": metrics.step_seconds,
            "samples_per_second": metrics.samples_per_second,
            "tokens_per_second": metrics.tokens_per_second,
            "bubble_measured": metrics.bubble_measured,
            "bubble_predicted": self._facts.bubble_predicted if self._facts else None,
            "bubble_span_measured": metrics.bubble_span_measured,
            "bubble_span_predicted": metrics.bubble_span_predicted,
            "step_seconds_predicted": metrics.step_seconds_predicted,
            **(self._facts.speed.of(metrics.step_seconds) if self._facts else {}),
            **_by_cause("idle", list(map(asdict, metrics.idle or ()))),
            "skipped": int(metrics.skipped) if metrics.skipped else None,
            "skipped_steps": metrics.skipped_steps or None,
        }
        self._log(metrics.step, {name: value for name, value in values.items() if value is not None})

    def log_validation(self, metrics: ValidationMetrics) -> None:
        self._log(metrics.step, {"validation_loss": metrics.loss})

    def finish(self, summary: Mapping[str, object], figure: Path | None, failed: bool) -> None:
        """Store summary, picture and files and end the run, as failed or killed where it was. Bounded in time."""
        run, self._run = self._run, None
        if run is None:
            return
        self._attempt(lambda: self._store(run, summary, figure))
        code = 0 if not failed else _KILLED if summary.get("status") == "interrupted" else 1
        self._attempt(lambda: run.finish(exit_code=code))

    def _open(self) -> None:
        # wandb's own telemetry waits 20 s for a server that doesn't answer when the process ends.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        defaults = wandb.setup(settings=_settings(silent=True)).settings
        # What `wandb offline` or `wandb disabled` left in this folder's wandb/settings counts as well.
        mode = defaults.mode if self._mode == "auto" else self._mode
        if mode == "disabled":
            return
        if mode == "offline":
            self._run = self._init("offline")
            log.info("W&B: offline run in %s", self._where(self._run))
        elif not _has_credentials(defaults):
            self._run = self._init("offline")
            log.info("W&B: no API key, so an offline run in %s (wandb sync uploads it)", self._where(self._run))
        else:
            self._open_online(mode)

    def _open_online(self, mode: str) -> None:
        import wandb

        folder = self._directory / "wandb"
        before = set(folder.glob("run-*"))
        try:
            self._run = self._init(mode)
            log.info("W&B: %s", self._run.url)
        except Exception as error:
            # The service still holds the run that failed: a new one falls back cleanly, and nothing is left to upload.
            wandb.teardown()
            wandb.setup(settings=_settings(silent=True))
            for leftover in set(folder.glob("run-*")) - before:
                shutil.rmtree(leftover, ignore_errors=True)
            self._run = self._init("offline")
            where = self._where(self._run)
            log.warning(
                "W&B: no connection (%s), so an offline run in %s (wandb sync uploads it)", _reason(error), where
            )

    def _init(self, mode: Any) -> wandb.Run:
        import wandb

        facts = self._facts
        assert facts is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self._project,
            dir=str(self._directory),
            mode=mode,
            group=self._group,
            name=self._name or _name(facts),
            job_type=facts.schedule,
            tags=list(dict.fromkeys((facts.schedule, facts.model, *self._tags))),
            config={**facts.config, "parameters": facts.parameters, "bubble_predicted": facts.bubble_predicted},
            # Without it a second job in one process (a sweep) would write into the first one's run.
            reinit="finish_previous",
            settings=_settings(
                silent=True,
                console="off",
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                x_transaction_log_flush_interval=1,
            ),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _where(self, run: wandb.Run) -> Path:
        return Path(run.settings.sync_dir)

    def _log(self, step: int, values: Mapping[str, object]) -> None:
        run = self._run
        if run is not None:
            self._step = max(self._step, step)
            self._attempt(lambda: run.log({"step": step, **values}, step=step))

    def _store(self, run: wandb.Run, summary: Mapping[str, Any], figure: Path | None) -> None:
        import wandb

        media: dict[str, object] = {"step": self._step}
        if figure is not None:
            media["timeline"] = wandb.Image(str(figure), caption="measured over predicted")
        run.log(media, step=self._step)
        run.summary.update({**summary, **_peaks(summary.get("ranks") or []), **_idle(summary.get("idle") or [])})
        for file in ("train.log", "summary.json", "timeline.json"):
            if (self._directory / file).is_file():
                run.save(str(self._directory / file), base_path=str(self._directory), policy="now")

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self._warn(_reason(error))

    def _warn(self, reason: str) -> None:
        """One line for the first thing that goes wrong; training goes on either way."""
        if not self._warned:
            log.warning("W&B: %s; training goes on, metrics.jsonl has every metric", reason)
        self._warned = True


def _settings(**values: object) -> wandb.Settings:
    """wandb.Settings, leaving out what an older wandb doesn't know (it would refuse)."""
    import wandb

    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in values.items() if name in known})


def _has_credentials(settings: Any) -> bool:
    """Whether wandb would find an API key. It would ask for one on a terminal, so we look first."""
    if settings.api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    # `default` entries are no W&B keys, so no authenticators().
    hosts = [urlsplit(settings.base_url).netloc]
    if not os.environ.get("WANDB_BASE_URL"):
        hosts.append("api.wandb.ai")
    return any(host in entries.hosts for host in hosts)


def _peaks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Each rank's peaks as flat numbers, and the largest: what W&B can plot and sort runs by."""
    values: dict[str, int] = {}
    for what in ("peak_memory_bytes", "peak_activation_bytes"):
        known = {rank["rank"]: rank[what] for rank in ranks if rank[what] is not None}
        values.update({f"{what}/rank {rank}": count for rank, count in known.items()})
        if known:
            values[f"{what}/max"] = max(known.values())
    return values


def _idle(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The typical step's idle seconds as flat numbers, predicted ones too."""
    measured, predicted = ([rank[kind] or {} for rank in ranks] for kind in ("measured", "predicted"))
    return {**_by_cause("idle", measured), **_by_cause("idle_predicted", predicted)}


def _by_cause(name: str, ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Idle seconds as `idle/<cause>/rank_<rank>`."""
    return {f"{name}/{cause}/rank_{rank}": ranks[rank][cause] for rank in range(len(ranks)) for cause in ranks[rank]}


def _reason(error: Exception) -> str:
    """The error's first line, short: of a long chain of causes ("a: b: c", addresses within) the first and the last."""
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    if len(reason) > _REASON_LENGTH:
        first, _, rest = reason.partition(": ")
        reason = f"{first} ... {rest.rpartition(': ')[2]}".rstrip(" .")
    return reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 4] + " ..."


def _name(facts: RunFacts) -> str:
    replicas = f"-dp{facts.dp}" if facts.dp > 1 else ""
    return f"{facts.schedule}-{facts.model}-pp{facts.pp}{replicas}"

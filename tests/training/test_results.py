"""What an evaluation and a generation leave: lines on the terminal, files in the run directory."""

from __future__ import annotations

import json
import math
from functools import partial

from pipeline.training.messages import Evaluated, Evaluating, Generated
from pipeline.training.results import Results, show_metrics, show_text
from tests.training.held_out import Letters


def test_metrics_are_printed_and_summarized(tmp_path, capsys):
    results = Results(tmp_path / "run", {"task": "evaluate", "checkpoint": tmp_path}, show_metrics)
    results.start()
    results(Evaluating(500, 2000))
    results(Evaluated(2000, {"loss": 1.25, "top1_accuracy": 0.5}, 4.0))
    results.finish("finished", steps_done=0)
    assert capsys.readouterr().out.splitlines() == [
        "500 of 2,000 held-out samples",
        "2,000 held-out samples in 4.0 s (500 samples/s)",
        "loss           1.2500",
        "top1 accuracy  50.00 %",
    ]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {
        **{"status": "finished", "error": None, "task": "evaluate", "checkpoint": str(tmp_path)},
        **{"loss": 1.25, "top1_accuracy": 0.5, "samples": 2000, "samples_per_second": 500.0, "seconds": 4.0},
    }


def test_a_text_is_printed_with_its_prompt_and_kept(tmp_path, capsys):
    results = Results(tmp_path, {"task": "generate"}, partial(show_text, Letters(), "AB", tmp_path))
    results.start()
    results(Generated((35, 36), 0.5))
    results.finish("finished")
    assert capsys.readouterr().out == "ABCD\n"
    assert (tmp_path / "generated.txt").read_text() == "ABCD"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["text"], summary["tokens"], summary["tokens_per_second"]) == ("ABCD", 2, 4.0)


def test_a_bad_end_is_told_with_what_was_known(tmp_path):
    results = Results(tmp_path, {"task": "evaluate", "seed": math.nan}, show_metrics)
    results.start()
    results.finish("failed", "ActionError: rank 1 failed")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        **{"status": "failed", "error": "ActionError: rank 1 failed", "task": "evaluate", "seed": None},
    }

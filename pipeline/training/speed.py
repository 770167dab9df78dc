"""A run's speed in floating-point operations, and as a share of what its devices could do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """A run's speed in the terms that runs are compared by, whatever their model and devices. None: not known."""

    flops_per_step: int | None = None
    """The model's: forward and backward, nothing twice that is recomputed."""
    peak_tflops: float | None = None
    """What all devices together could do."""

    def of(self, seconds: float | None) -> dict[str, float | None]:
        """`tflops_per_second` of all devices together, and `mfu`, its share of what they could do.

        Args:
            seconds: a step's time.
        """
        if self.flops_per_step is None or not seconds:
            return {"tflops_per_second": None, "mfu": None}
        speed = self.flops_per_step / seconds / 1e12
        return {"tflops_per_second": speed, "mfu": None if self.peak_tflops is None else speed / self.peak_tflops}

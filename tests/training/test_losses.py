"""Any loss as a sum and a weight: cut in parts, it gives PyTorch's mean over the whole."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.loss import CrossEntropy
from pipeline.training.losses import as_sum

CLASSES = 5
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def classes(*shape):
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))


def padded(*shape, padding=-100):
    targets = classes(*shape)
    targets[2:5] = padding
    return targets


def smooth(outputs, targets, reduction="mean", beta=0.1):
    """A function of the user's, as PyTorch's are."""
    return F.smooth_l1_loss(outputs, targets, reduction=reduction, beta=beta)


class Focal(nn.Module):
    """A module of the user's with PyTorch's argument in its call."""

    def forward(self, outputs, targets, reduction="mean"):
        return smooth(outputs, targets, reduction)


def mean_of_rows(outputs, targets):
    return (outputs - targets).square().sum(-1).mean()


LOGITS, ROWS = numbers(7, CLASSES), numbers(7, 3)
CASES = {
    "cross_entropy": (F.cross_entropy, LOGITS, classes(7)),
    "padding": (F.cross_entropy, LOGITS, padded(7)),
    "own padding": (partial(F.cross_entropy, ignore_index=3), LOGITS, padded(7, padding=3)),
    "pixels": (F.cross_entropy, numbers(7, CLASSES, 4, 2), padded(7, 4, 2)),
    "class weights": (partial(F.cross_entropy, weight=WEIGHT), LOGITS, padded(7)),
    "smoothed": (partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1), LOGITS, padded(7)),
    "probabilities": (partial(F.cross_entropy, weight=WEIGHT), LOGITS, LOGITS.softmax(1)),
    "nll": (nn.NLLLoss(WEIGHT), LOGITS.log_softmax(1), padded(7)),
    "module": (nn.CrossEntropyLoss(WEIGHT, ignore_index=1), LOGITS, padded(7, padding=1)),
    "squares": (F.mse_loss, ROWS, numbers(7, 3).flip(0)),
    "logits": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), ROWS, numbers(7, 3).sigmoid()),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), LOGITS.flip(0).softmax(1)),
    "labels": (F.multilabel_soft_margin_loss, ROWS, (numbers(7, 3) > 0).double()),
    "margins": (nn.MultiLabelMarginLoss(), LOGITS, classes(7, CLASSES)),
    "margin": (F.multi_margin_loss, LOGITS, classes(7)),
    "user's function": (smooth, ROWS, numbers(7, 3).flip(0)),
    "user's partial": (partial(smooth, beta=0.5), ROWS, numbers(7, 3).flip(0)),
    "user's module": (Focal(), ROWS, numbers(7, 3).flip(0)),
    "a mean alone": (mean_of_rows, ROWS, numbers(7, 3).flip(0)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [(7,), (2, 2, 2, 1), (3, 4), (1,) * 7])
def test_parts_add_up_to_pytorchs_mean(case, sizes):
    loss, outputs, targets = CASES[case]
    ours, expected = (outputs.clone().requires_grad_() for _ in range(2))
    summed, weight = as_sum(loss), as_sum(loss).weight(targets)
    parts = [
        summed(part, target) / weight for part, target in zip(ours.split(sizes), targets.split(sizes), strict=True)
    ]
    sum(parts).backward()
    mean = loss(expected, targets)
    mean.backward()
    assert torch.allclose(sum(parts), mean, rtol=1e-12)
    assert torch.allclose(ours.grad, expected.grad, rtol=1e-12, atol=1e-15)


def test_the_users_module_stays_as_it_was():
    loss = nn.CrossEntropyLoss()
    assert as_sum(loss)(LOGITS, classes(7)) > loss(LOGITS, classes(7))
    assert loss.reduction == "mean"


def test_nothing_counts_in_padding_alone():
    targets = torch.full((7,), -100)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(WEIGHT)):
        assert as_sum(loss).weight(targets) == 0
        assert as_sum(loss)(LOGITS, targets) == 0


def test_a_loss_that_sums_already_is_taken_as_it_is():
    loss = CrossEntropy()
    assert as_sum(loss) is loss


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss, r"the loss is the class CrossEntropyLoss: make one of it, CrossEntropyLoss\(\)"),
        (None, "loss=None can't be called"),
        (partial(F.mse_loss, reduction="sum"), "the loss has reduction='sum', and a step gives the mean"),
        (nn.MSELoss(reduction="none"), "the loss has reduction='none'"),
        (nn.AdaptiveLogSoftmaxWithLoss(8, 9, [3]), r"the loss has parameters \(AdaptiveLogSoftmaxWithLoss\)"),
    ],
)
def test_what_is_no_loss(loss, message):
    with pytest.raises(ValueError, match=message):
        as_sum(loss)


def test_a_loss_must_give_one_number():
    with pytest.raises(ValueError, match=r"gave a tensor of shape \[7\]: let it give the mean over samples"):
        as_sum(lambda outputs, targets: (outputs - targets).sum(-1))(ROWS, ROWS)
    with pytest.raises(ValueError, match="gave a tuple: let it give the mean over samples, a tensor of one number"):
        as_sum(lambda outputs, targets: (outputs.mean(), targets.mean()))(ROWS, ROWS)

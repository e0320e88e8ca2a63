"""A seeded training loop with a time budget: CUDA graphs on a GPU, averaged weights, checkpoints, a curve."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

Batch = dict[str, torch.Tensor]
_SAVE_EVERY_S = 30
_CHECK_EVERY, _RECORD_EVERY = 20, 100
_WARM_UP_STEPS = 3
_AVERAGING, _AVERAGED_STEPS = 0.1, 500
"""The moving average is over about the last tenth of the steps, at most so many."""


@dataclass(frozen=True)
class Budget:
    """How long to train: until either is used up; the learning rate falls over what is used up first.

    Args:
        minutes: of training, those before an interruption included.
        steps: of the optimizer.
    """

    minutes: float
    steps: int = 10**9


@dataclass(frozen=True)
class Kind:
    """One kind of batch.

    Args:
        share: how often it is drawn, relative to the others.
        make: a new batch; every batch of a kind has the same shapes.
        step: what is done with it: gradients to None, losses, backward, optimizer steps. Returns the figures for the
            curve, float32 [n].
    """

    share: float
    make: Callable[[], Batch]
    step: Callable[[Batch], torch.Tensor]


def make_optimizer(parameters: list[nn.Parameter], betas: tuple[float, float], decay: float) -> torch.optim.Optimizer:
    """AdamW whose learning rate a captured graph can be told."""
    cuda = parameters[0].device.type == "cuda"
    rate = torch.zeros((), device=parameters[0].device) if cuda else 0.0
    return torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=decay, fused=cuda, capturable=cuda)


class Trainer:
    """Trains until the budget is used up, going on from where an interrupted run was saved.

    Args:
        name: of the stage, for its files: `<name>.state.pt` and `<name>.curve.json`.
        folder: where they lie.
        model: what is saved, the optimizers aside.
        averaged: parameters whose moving average is what the stage gives in the end.
        optimizers: each with its highest learning rate.
        figures: names of what the steps return.
        seed: of everything that is drawn.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        model: nn.Module,
        averaged: list[nn.Parameter],
        optimizers: list[tuple[torch.optim.Optimizer, float]],
        figures: list[str],
        seed: int,
    ) -> None:
        self.name, self.folder, self.model = name, folder, model
        self.averaged, self.optimizers, self.figures, self.seed = averaged, optimizers, figures, seed
        self.device = averaged[0].device
        self.step, self.seconds = 0, 0.0
        self.curve: list[list[float]] = []
        self.average = [parameter.detach().clone() for parameter in averaged]
        self._state_path = folder / f"{name}.state.pt"
        folder.mkdir(parents=True, exist_ok=True)
        if self._state_path.exists():
            self._load()
        torch.manual_seed(seed + self.step)
        self._kinds_rng = np.random.RandomState(seed + self.step)

    def run(self, kinds: dict[str, Kind], budget: Budget, warm_up: int = 200) -> None:
        """Train.

        Args:
            warm_up: steps over which the learning rate rises.
        """
        runs = {name: self._capture(kind) if self.device.type == "cuda" else kind.step for name, kind in kinds.items()}
        names, shares = list(kinds), np.array([kind.share for kind in kinds.values()])
        began = saved = time.monotonic()
        before = self.seconds
        recent = None
        while True:
            if self.step % _CHECK_EVERY == 0 or self.step >= budget.steps:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                now = time.monotonic()
                self.seconds = before + now - began
                done = max(self.seconds / (60 * budget.minutes), self.step / budget.steps)
                if recent is not None and (self.step % _RECORD_EVERY == 0 or done >= 1):
                    self._record(recent)
                if done >= 1:
                    break
                if now - saved > _SAVE_EVERY_S:
                    self._save()
                    saved = now
                self._set_rate(min(1.0, (self.step + 1) / warm_up) * (0.02 + 0.49 * (1 + math.cos(math.pi * done))))
            name = names[self._kinds_rng.choice(len(names), p=shares / shares.sum())]
            figures = runs[name](kinds[name].make())
            recent = figures.clone() if recent is None else recent.lerp_(figures, 0.05)
            share = 1 / min(1 + _AVERAGING * self.step, _AVERAGED_STEPS)
            torch._foreach_lerp_(self.average, self.averaged, share)
            self.step += 1
        self._save()

    def take_average(self) -> None:
        """Put the averaged weights into the model."""
        with torch.no_grad():
            for parameter, average in zip(self.averaged, self.average, strict=True):
                parameter.copy_(average)

    def _capture(self, kind: Kind) -> Callable[[Batch], torch.Tensor]:
        """A kind's step as a CUDA graph."""
        self._set_rate(0.0)  # the steps before the capture move nothing but the optimizers' averages
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                kind.step(kind.make())
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        inputs = kind.make()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            figures = kind.step(inputs)

        def run(batch: Batch) -> torch.Tensor:
            for key, tensor in batch.items():
                inputs[key].copy_(tensor)
            graph.replay()
            return figures

        return run

    def _set_rate(self, share: float) -> None:
        for optimizer, highest in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(highest * share)
                else:
                    group["lr"] = highest * share

    def _record(self, recent: torch.Tensor) -> None:
        values = [round(value, 5) for value in recent.tolist()]
        self.curve.append([self.step, round(self.seconds, 1), *values])
        if self.step % (5 * _RECORD_EVERY) == 0:
            print(f"{self.name} step {self.step}, {self.seconds:.0f} s:", dict(zip(self.figures, values, strict=True)))

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        part = self._state_path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self._state_path)
        curve = {"name": self.name, "columns": ["step", "seconds", *self.figures], "rows": self.curve}
        (self.folder / f"{self.name}.curve.json").write_text(json.dumps(curve))

    def _load(self) -> None:
        state = torch.load(self._state_path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for average, saved in zip(self.average, state["average"], strict=True):
            average.copy_(saved)
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]

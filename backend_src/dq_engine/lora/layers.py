"""The model's layers that take adapters, and slots for adapters on the device.

All matrices of a slot lie in one row of one tensor, so that an adapter is loaded by a single copy. A slot has room for
every layer at the largest rank; what an adapter does not use is zero.
"""

import contextlib
import logging
import math
import mmap
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dq_engine.kernels.lora import compile_kernels, equal_tiles, prompt_tiles
from dq_engine.nano import LoRAConfig, LoraLayer, VoxCPM2Model, adapter_rows, lora_layers

logger = logging.getLogger(__name__)

_ALIGNMENT = 128
"""Elements; a matrix begins at a multiple of it."""
_RANK_STEP = 16
"""The kernels multiply 16 x 16 at least."""


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter on the host, laid out as in a slot, so that loading it is one copy.

    Args:
        rank, alpha: as the file says.
        row: all its matrices, like `LoraLayers.slot`; on a GPU in memory that the device copies from by itself.
    """

    rank: int
    alpha: float
    row: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.row.nbytes


@dataclass(frozen=True)
class LoraSettings:
    """How many adapters of what size, and which projections they may change.

    A layer that holds several projections (q, k and v; gate and up) takes all of them if it takes one.

    Args:
        num_slots: adapters on the device.
        max_rank: largest rank of an adapter.
        lm, dit: names of projections in the layers of the language models, and of LocDiT.
        between: names of projections between the models.
    """

    num_slots: int
    max_rank: int
    lm: list[str]
    dit: list[str]
    between: list[str]

    def model_config(self) -> LoRAConfig:
        """What a model is built with that can take such adapters."""
        return LoRAConfig(
            enable_lm=bool(self.lm),
            enable_dit=bool(self.dit),
            enable_proj=bool(self.between),
            max_loras=1,  # the memory that the layers take themselves is given up at once for that of `LoraLayers`
            max_lora_rank=self.max_rank,
            target_modules_lm=_whole_layers(self.lm),
            target_modules_dit=_whole_layers(self.dit),
            target_proj_modules=self.between,
        )


class LoraLayers:
    """The LoRA layers of one model, and slots for adapters, all zero at first.

    Args:
        model: built with the settings' `model_config`.
        settings: of the slots.
    """

    def __init__(self, model: VoxCPM2Model, settings: LoraSettings) -> None:
        self.num_slots, self.max_rank = settings.num_slots, settings.max_rank
        self._key, self.layers = lora_layers(model)
        self._rank = -(-self.max_rank // _RANK_STEP) * _RANK_STEP
        # LocDiT sees 2 tokens of mu, one of the time, the patch before and the patch; once with and once without mu.
        estimator = model.feat_decoder.estimator
        self._diffusion_tokens = 3 + 2 * model.patch_size
        weight = estimator.in_proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self._places: list[tuple[LoraLayer, int, int]] = []
        end = 0
        for layer in self.layers:
            a = _aligned(end)
            b = _aligned(a + len(layer.sizes) * self._rank * layer.inputs)
            end = b + sum(layer.sizes) * self._rank
            self._places.append((layer, a, b))
        self._storage = torch.zeros(self.num_slots, _aligned(end), dtype=self.dtype, device=self.device)
        for layer, *matrices in self._matrices(self._storage):
            layer.bind(*matrices)

    @property
    def slot_bytes(self) -> int:
        return self._storage[0].nbytes

    def slot(self, index: int) -> torch.Tensor:
        """All matrices of a slot, [n] in the model's dtype, on the device."""
        return self._storage[index]

    def pack(self, rank: int, alpha: float, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> AdapterWeights:
        """Lay an adapter's matrices out as in a slot.

        Args:
            rank, alpha: of the adapter; B is multiplied by alpha / rank.
            a: of each projection by its name in the file, [rank, inputs], in any floating dtype.
            b: of the same projections, [outputs, rank].
        """
        # Pages of its own, zero at first: memory is pinned by the page.
        row = torch.frombuffer(mmap.mmap(-1, self.slot_bytes), dtype=self.dtype)
        for layer, all_a, all_b in self._matrices(row[None]):
            begin = 0
            for index, (target, size) in enumerate(zip(layer.targets, layer.sizes, strict=True)):
                if target in a:
                    all_a[0, index, :rank].copy_(a[target])
                    all_b[0, begin : begin + size, :rank].copy_(b[target].float() * (alpha / rank))
                begin += size
        weights = AdapterWeights(rank, alpha, row)
        if self.device.type == "cuda":
            _pin(weights)
        return weights

    def compile_kernels(self) -> None:
        """Compile the kernels, which a prompt may need first while others speak: prompts run without graphs too."""
        kinds = {(layer.inputs, *layer.sizes): (a, b, layer.sizes) for layer, a, b in self._matrices(self._storage)}
        for a, b, sizes in kinds.values():
            compile_kernels(a, b, sizes)

    @contextlib.contextmanager
    def decoding(self, adapters: torch.Tensor) -> Iterator[None]:
        """For a pass in which each of R streams is fed one patch.

        Args:
            adapters: integers [R] on the device, each stream's slot or -1.
        """
        rows = equal_tiles(adapters, 1)
        with adapter_rows(self._key, {"tokens": rows, "patches": rows, "heads": rows}):
            yield

    @contextlib.contextmanager
    def sampling(self, adapters: torch.Tensor) -> Iterator[None]:
        """For LocDiT on R streams; `adapters` as of `decoding`."""
        with adapter_rows(self._key, {"diffusion": equal_tiles(adapters, self._diffusion_tokens, copies=2)}):
            yield

    @contextlib.contextmanager
    def encoding(self, adapters: torch.Tensor) -> Iterator[None]:
        """For a pass of LocEnc over A patches of prompts; `adapters` as of `decoding`, [A]."""
        with adapter_rows(self._key, {"patches": equal_tiles(adapters, 1)}):
            yield

    @contextlib.contextmanager
    def prompts(
        self, adapters: torch.Tensor, tiles: torch.Tensor, per_tile: int, query_starts: torch.Tensor, tokens: int
    ) -> Iterator[None]:
        """For a pass over P prompts' tokens, of which one each is sampled.

        Args:
            adapters: as of `decoding`, [P].
            tiles, per_tile, query_starts: see `kernels.lora.prompt_tiles`.
            tokens: in the pass, padding included.
        """
        rows = {
            "tokens": prompt_tiles(tiles, per_tile, query_starts, adapters, tokens),
            "heads": equal_tiles(adapters, 1),
        }
        with adapter_rows(self._key, rows):
            yield

    def _matrices(self, rows: torch.Tensor) -> Iterator[tuple[LoraLayer, torch.Tensor, torch.Tensor]]:
        """Each layer, its A [slots, projections, rank, inputs] and its B [slots, outputs, rank], in rows [slots, n]."""
        for layer, a, b in self._places:
            shape = (len(layer.sizes), self._rank, layer.inputs)
            outputs = sum(layer.sizes)
            yield (
                layer,
                rows[:, a : a + math.prod(shape)].unflatten(1, shape),
                rows[:, b : b + outputs * self._rank].unflatten(1, (outputs, self._rank)),
            )


def _pin(weights: AdapterWeights) -> None:
    """Let the device copy from an adapter's memory without the host. Where that is refused a copy takes longer.

    (Memory that PyTorch itself pins is rounded up to a power of two.)
    """
    runtime, address = torch.cuda.cudart(), weights.row.data_ptr()
    if error := int(runtime.cudaHostRegister(address, weights.nbytes, 0)):
        logger.warning("an adapter's memory cannot be pinned (CUDA error %d): loading it will take longer", error)
    else:
        weakref.finalize(weights, runtime.cudaHostUnregister, address)


def _whole_layers(targets: list[str]) -> list[str]:
    groups = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    return [name for group in groups if set(group) & set(targets) for name in group]


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT

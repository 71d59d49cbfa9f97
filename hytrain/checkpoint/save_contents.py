"""What a save writes beside the state tensors, as it is at the save's step."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from hytrain.checkpoint.archive_writer import LaterTensor, PickledObjects
from hytrain.checkpoint.gather import ParameterPlace
from hytrain.checkpoint.universal import pack_optimizer_state
from hytrain.comm.collectives import ShardCollectives
from hytrain.errors import CheckpointError
from hytrain.kernels.host_memory import host_copy
from hytrain.optimizer.kept_state import KeptState

logger = logging.getLogger(__name__)

_MOST_ON_DEVICE = 64 * 2**20
"""Bytes of tensors that are copied on their device, without a wait. More go to the host."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that no step changes: read only when it is written, and must be the same then.

    Attributes:
        version: torch's count of changes when the save began.
    """

    name: str
    tensor: torch.Tensor
    version: int

    def again(self) -> Constant:
        """The same tensor with its present version."""
        return replace(self, version=self.tensor._version)

    def read(self) -> torch.Tensor:
        """Its elements, on the host; raises a CheckpointError if it has been changed since."""
        host = self.tensor.detach().to("cpu").contiguous()
        if self.tensor._version != self.version:  # after the copy, to notice a change during it
            raise CheckpointError(
                f"'{self.name}', which is not trained, was changed while it was being saved: "
                'change it before save_checkpoint, or set "hytrain.checkpoint.async" to false'
            )
        return host


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """A module's state dict without its large tensors, which are written later.

    Attributes:
        state: name -> a :class:`LaterTensor` for each parameter, else what the module has.
        constants: key of a frozen parameter -> its tensor.
    """

    state: dict[str, Any]
    constants: dict[str, Constant]

    @classmethod
    def of(cls, state: Mapping[str, Any], places: list[ParameterPlace]) -> ModuleTensors:
        """Makes it from a module's state dict, with the parameters themselves as values."""
        trained = {id(place.slot.parameter): key_of(at) for at, place in enumerate(places)}
        keys: dict[int, LaterTensor] = {}
        constants: dict[str, Constant] = {}

        def later(name: str, value: Any) -> Any:
            if not isinstance(value, nn.Parameter):
                return value.detach() if isinstance(value, torch.Tensor) else value
            found = keys.get(id(value))
            if found is None:
                key = trained.get(id(value), f"parameter{len(keys)}")
                found = keys[id(value)] = LaterTensor(key, tuple(value.shape), value.dtype)
                if id(value) not in trained:
                    constants[key] = Constant(name, value, value._version)
            return found

        return cls({name: later(name, value) for name, value in state.items()}, constants)


def key_of(index: int) -> str:
    """The key of a trained parameter's elements in the model states' file; names are not used.

    torch's reader ignores the case of keys.
    """
    return f"trained{index}"


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The model states' file, without the elements of its parameters.

    Attributes:
        objects: everything else in it.
        constants: the frozen parameters.
        metadata: everything but weights, a file for plain DeepSpeed's ZeRO-3.
    """

    objects: PickledObjects
    constants: Mapping[str, Constant]
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SaveContents:
    """What is saved besides the state tensors.

    Attributes:
        places: all trained parameters.
        steps: number of steps that each parameter group has made.
        optimizer_state: what ``optimizer_state.pt`` holds.
        model_states, failure: on rank 0 only; the latter says why there are none.
    """

    places: list[ParameterPlace]
    steps: list[int]
    optimizer_state: dict[str, Any] = field(repr=False)
    model_states: ModelStates | None
    failure: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint."""
        return self.part_bytes(1.0)

    def part_bytes(self, share: float) -> int:
        """Bytes of all tensors, with this share of the optimizer's state."""
        size = int(share * sum(4 * x.numel * len(x.kinds) for x in self.places))
        size += sum(x.numel * x.dtype.itemsize for x in self.places)
        if self.model_states is not None:
            states = self.model_states
            size += sum(constant.tensor.nbytes for constant in states.constants.values())
            size += sum(tensor.nbytes for tensor in states.objects.storages.values())
        return size


ModelStatesLater = Callable[[Sequence[Mapping[str, Any]]], ModelStates]
"""Puts the model states together, given the ranks' random number generators, by rank."""


def take_contents(
    kept: KeptState,
    places: list[ParameterPlace],
    model_states: Callable[[], ModelStatesLater],
    collectives: ShardCollectives,
) -> Callable[[], SaveContents]:
    """Takes what is to be saved: later changes do not reach it.

    ``model_states`` is called on rank 0 only.

    Returns:
        A function that puts it together; a collective of ``collectives``, in any thread.
    """
    # Lists of all parameters are left to the function: they take long and do not change.
    groups = [
        {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in kept.hyper.groups
    ]
    steps = list(kept.hyper.steps)
    clip, scaling = kept.pipeline.norm.settings.max_norm, copy.deepcopy(kept.scaling)
    randomness = random_state(kept.device)
    later, failure = None, None
    if kept.collectives.rank == 0:
        later, failure = _attempt(model_states)

    def put_together() -> SaveContents:
        everywhere = collectives.objects_on_first(randomness, "random number generators")
        states, problem = None, failure
        if later is not None:
            states, problem = _attempt(partial(later, everywhere))
        state = pack_optimizer_state(
            groups,
            steps,
            places,
            clip=clip,
            num_ranks=kept.collectives.world_size,
            scaling=scaling,
            moments=kept.form,
        )
        return SaveContents(places, steps, state, states, problem)

    return put_together


_Made = TypeVar("_Made")


def _attempt(make: Callable[[], _Made]) -> tuple[_Made | None, str | None]:
    try:
        return make(), None
    except Exception as error:
        # For example, client state that cannot be pickled. A rank that raised here would
        # leave the others waiting; it raises with them when nothing has been written.
        return None, (
            f"mp_rank_00_model_states.pt could not be written ({type(error).__name__}: "
            f"{error}): leave it out of the client state, or out of the module's"
        )


def copy_objects(objects: Any) -> Any:
    """A copy that later changes do not reach; tensors stay on their devices."""
    try:
        return copy.deepcopy(objects)
    except Exception:
        # Not all that can be pickled can be copied: tensors that autograd has made, for one.
        logger.debug("copied by pickling", exc_info=True)
        return pickle.loads(pickle.dumps(objects))


def copy_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors, on current streams; those that share memory share it in the copies."""
    copies: dict[int, torch.UntypedStorage] = {}
    left = _MOST_ON_DEVICE
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        handle = int(cast(Any, storage)._cdata)
        copied = copies.get(handle)
        if copied is None:
            is_waited_for = False
            if tensor.device.type != "cpu":
                left -= storage.nbytes()
                is_waited_for = left < 0
            copied = storage.cpu() if is_waited_for else storage.clone()
            copies[handle] = copied
        place = torch.empty(0, dtype=tensor.dtype, device=copied.device)
        found[name] = place.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
    return found


def collect_module_state(
    kept: KeptState,
    module_tensors: Callable[[], Mapping[str, Any]],
    *,
    with_frozen: bool,
    as_copies: bool,
) -> dict[str, Any]:
    """A module's state dict under ZeRO-3, on rank 0; a collective, one layer at a time.

    ``module_tensors`` gives the state dict by name, without reading weights. With ``as_copies``
    what is whole on every rank is copied to the host, too, each tensor into memory of its own:
    accelerate takes tensors that share memory for tied ones, and saves only one of them.

    Returns:
        Name -> tensor; sharded weights on the host, tied ones as one tensor. On other ranks an
        empty dict.
    """
    kept.synchronize()
    is_first = kept.collectives.rank == 0
    copies: dict[int, torch.Tensor] = {}
    for some in kept.weights.copies_on_first(is_first, lambda x: x.parts(with_frozen=with_frozen)):
        copies.update(some)
    if not is_first:
        return {}
    state: dict[str, Any] = {}
    for name, tensor in module_tensors().items():
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and not with_frozen:
            continue
        if not isinstance(tensor, torch.Tensor):
            state[name] = tensor  # a module's extra state
        elif id(tensor) in copies:
            state[name] = copies[id(tensor)]
        elif as_copies:
            whole, purpose = tensor.detach(), f"a copy of '{name}'"
            state[name] = copies[id(tensor)] = host_copy(whole, whole.dtype, purpose=purpose)
        else:
            state[name] = tensor.detach()
    return state


def shared_parameters(module: nn.Module) -> dict[str, str]:
    """Tied parameters: name -> the name under which the tensor is stored."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stored = first.setdefault(id(parameter), name)
        if stored != name:
            shared[name] = stored
    return shared


def random_state(device: torch.device) -> dict[str, Any]:
    """States of random number generators here and on the device, as numbers and bytes; 10 KB."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys).tobytes(), position, has_gauss, gauss),
        "torch": _bytes(torch.get_rng_state()),
    }
    if device.type == "cuda":
        found["cuda"] = _bytes(torch.cuda.get_rng_state(device))
    return found


def restore_random_states(
    stored: Sequence[Mapping[str, Any]] | None,
    device: torch.device,
    collectives: ShardCollectives,
) -> None:
    """Restores this process's random number generators; logs it if that is not possible.

    With another number of ranks there is no state that would be this rank's, and two ranks that got
    the same one would draw the same numbers: generators go on from the script's own seeds.

    ``stored`` is what :func:`random_state` has returned on each rank.
    """
    if stored is None:
        logger.info("the checkpoint has no states of random number generators")
        return
    if len(stored) != collectives.world_size:
        if collectives.rank == 0:
            logger.warning(
                "the checkpoint has the random number generators of %d ranks and this job has %d: "
                "they are not restored, and dropout goes on from this script's own seeds",
                len(stored),
                collectives.world_size,
            )
        return
    mine = stored[collectives.rank]
    random.setstate(mine["python"])
    name, keys, *rest = mine["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(mine["torch"]))
    if device.type == "cuda":
        if "cuda" in mine:
            torch.cuda.set_rng_state(_tensor(mine["cuda"]), device)
        elif collectives.rank == 0:
            logger.warning(
                "the checkpoint was saved without a GPU: the random number generators of the GPUs "
                "are not restored"
            )


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)

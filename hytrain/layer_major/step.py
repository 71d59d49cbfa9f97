"""All micro-batches of a step go through one block before the next: forward, and back again.

Forward: every micro-batch's forward stops at each block (`suspended_forward.py`); the blocks are
computed here, one after another, each for all micro-batches. Only the blocks' inputs are kept.
Backward: after the last block each micro-batch's loss is run back to that block's output at once;
then every block is computed again, with its graph, for one micro-batch after another.

What the model computes between blocks keeps its graph (`graph_cut.py`). Every parameter gets its
gradients in the order of the micro-batches, from the same numbers as micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hytrain.layer_major.activations import Kept, Offloaded, OffloadedActivations
from hytrain.layer_major.block_calls import BlockCalls, Call
from hytrain.layer_major.graph_cut import (
    Add,
    MicroBatchGraph,
    NotLayerMajor,
    Target,
    cut,
    inside_block,
    run_back,
)
from hytrain.layer_major.layer_passes import LayerPasses
from hytrain.layer_major.suspended_forward import BlockCall, SuspendedForward
from hytrain.layer_major.tensor_tree import leaves, map_leaves, snapshot, was_changed
from hytrain.layer_major.thread_context import Autocast, warning_filters_kept
from hytrain.layer_major.validation import Validation
from hytrain.optimizer.randomness import MicroBatchRandomness, State

PREFETCHED = 2
"""Calls of blocks whose inputs are on their way back to the device while another is computed."""


@dataclass(frozen=True, slots=True)
class _Input:
    """A tensor among a block's arguments."""

    held: Kept | Offloaded
    target: Add | None


@dataclass(slots=True)
class _SavedCall:
    """What is needed to compute a block again.

    Attributes:
        arguments: (args, kwargs) with an :class:`_Input` for each tensor.
        outputs: where the outputs' gradients go; None for outputs without one.
    """

    arguments: Any
    autocast: Autocast
    random: State
    outputs: list[Target | None]

    def held(self) -> list[Kept | Offloaded]:
        return [part.held for part in leaves(self.arguments, _Input)]


class LayerMajorStep:
    """One step's micro-batches on their way through the layers.

    ``weigh`` takes a micro-batch's number and output, and returns the loss to run back. Without a
    ``store`` the blocks' inputs stay where they are.
    """

    def __init__(
        self,
        calls: BlockCalls,
        forwards: Sequence[Callable[[], Any]],
        weigh: Callable[[int, Any], torch.Tensor],
        owner: LayerPasses,
        store: OffloadedActivations | None,
        randomness: MicroBatchRandomness,
        device: torch.device,
        validation: Validation | None = None,
    ) -> None:
        self._calls = calls
        self._weigh = weigh
        self._owner = owner
        self._store = store
        self._randomness = randomness
        self._validation = validation
        self._forwards = [
            SuspendedForward(forward, device, f"micro-batch {number}")
            for number, forward in enumerate(forwards)
        ]
        self._numbers = range(len(forwards))
        self._graphs = [MicroBatchGraph() for _ in forwards]
        self._saved: list[list[_SavedCall | None]] = []
        self._seen = [WeakTensorKeyDictionary() for _ in forwards]
        self._waiting: list[BlockCall] = []
        self._outputs: list[Any] = []

    def run(self) -> None:
        """Runs forward and backward of all micro-batches.

        Raises:
            NotLayerMajor: the model cannot be computed layer by layer.
        """
        if self._store is not None:
            self._store.begin_step()
        with warning_filters_kept():
            try:
                with self._calls.stopping() as blocks:
                    self._walk(blocks)
            finally:
                self._give_up()

    def _walk(self, blocks: Sequence[Call]) -> None:
        owner, last = self._owner, len(blocks) - 1
        owner.begin_layers()
        self._waiting = [self._advance(number, 0) for number in self._numbers]
        for index, block in enumerate(blocks):
            self._forward_through(index, block, index == last)
        self._finish(0)
        owner.turn_back(len(self._numbers))
        self._run_losses_back()
        for index in reversed(range(len(blocks))):
            self._back_through(index, blocks[index])
            owner.block_done(index)
        owner.end_layers()

    def _give_up(self) -> None:
        """Drops all that is kept, whether the step is over or not."""
        for forward in reversed(self._forwards):
            forward.cancel()
        for graph in self._graphs:
            graph.forget()
        self._saved.clear()
        self._waiting.clear()
        self._outputs.clear()

    # -- forward -------------------------------------------------------------------------------

    def _forward_through(self, index: int, block: Call, is_last: bool) -> None:
        """Computes one block for all micro-batches, then what follows it, for all of them.

        So weights that are used between blocks are needed in one go as well. After the last block
        no micro-batch goes on.
        """
        self._saved.append([])
        waiting, self._waiting = self._waiting, []
        for number in self._numbers:
            self._outputs.append(self._compute(block, number, waiting[number]))
        waiting.clear()
        if is_last:
            return
        outputs, self._outputs = self._outputs, []
        for number in self._numbers:
            output, outputs[number] = outputs[number], None
            self._waiting.append(self._advance(number, index + 1, output))
            del output

    def _advance(self, number: int, block: int, output: Any = None) -> BlockCall:
        """Lets a micro-batch's forward go on to the block, which must be the next."""
        self._randomness.choose(number)
        event = self._forwards[number].advance(output)
        if not isinstance(event, BlockCall):
            raise NotLayerMajor(
                f"its forward has returned without calling '{self._calls.names[block]}'"
            )
        if event.index != block:
            raise NotLayerMajor(
                f"its forward calls '{self._calls.names[event.index]}' where "
                f"'{self._calls.names[block]}' is the next block: each must be called once, in the "
                "order of the layers"
            )
        if not event.with_gradients:
            raise NotLayerMajor(
                f"'{self._calls.names[block]}' is called with gradients turned off (a reentrant "
                "checkpoint around it does that)"
            )
        if event.packs_tensors:
            raise NotLayerMajor(
                f"'{self._calls.names[block]}' is called inside of a checkpoint, or of other hooks "
                "on saved tensors: remove them, for blocks are recomputed here anyway"
            )
        if self._validation is not None:
            self._validation.at_block(block)
        return event

    def _compute(self, block: Call, number: int, call: BlockCall) -> Any:
        """A block's output for the micro-batch, cut off from the block's own graph."""
        self._randomness.choose(number)
        if not self._needs_gradient(call):
            self._saved[-1].append(None)
            with call.autocast.applied():
                return call.context.run(block, *call.args, **call.kwargs)
        saved = self._save(number, call)
        passed = map_leaves(
            (call.args, call.kwargs),
            torch.Tensor,
            lambda tensor: cut(tensor, inside_block) if tensor.requires_grad else tensor,
        )
        before = snapshot(passed)
        if self._validation is not None:
            self._validation.before_block(call.index)
        with call.autocast.applied():
            output = call.context.run(block, *passed[0], **passed[1])
        if self._validation is not None:
            self._validation.after_block(call.index)
        if was_changed(before):
            raise NotLayerMajor(
                f"'{self._calls.names[call.index]}' changes a list or mapping among its arguments"
            )
        for held in saved.held():
            held.check()
        self._saved[-1].append(saved)

        def cut_off(tensor: torch.Tensor) -> torch.Tensor:
            target = Target(call.index) if tensor.requires_grad else None
            saved.outputs.append(target)
            return tensor if target is None else self._graphs[number].output(tensor, target)

        if self._validation is not None:
            self._validation.first_pass(call.index, number, leaves(output, torch.Tensor))
        return map_leaves(output, torch.Tensor, cut_off)

    def _needs_gradient(self, call: BlockCall) -> bool:
        block = self._calls.blocks[call.index]
        if any(parameter.requires_grad for parameter in block.parameters()):
            return True
        return any(t.requires_grad for t in leaves((call.args, call.kwargs), torch.Tensor))

    def _save(self, number: int, call: BlockCall) -> _SavedCall:
        graph, seen = self._graphs[number], self._seen[number]
        inputs: dict[int, _Input] = {}

        def keep(tensor: torch.Tensor) -> _Input:
            if id(tensor) not in inputs:  # else it is given twice
                target = graph.target(tensor) if tensor.requires_grad else None
                if target is inside_block:
                    raise NotLayerMajor(
                        f"'{self._calls.names[call.index]}' is given a tensor of another block's "
                        "that is not among that block's outputs"
                    )
                # What was given to an earlier block, too, does not lead from one to the next only.
                is_new = target is not None and tensor not in seen
                seen[tensor] = True
                store = self._store
                held = Kept(tensor) if store is None else store.put(tensor, is_boundary=is_new)
                inputs[id(tensor)] = _Input(held, target)
            return inputs[id(tensor)]

        arguments = map_leaves((call.args, call.kwargs), torch.Tensor, keep)
        return _SavedCall(arguments, call.autocast, self._randomness.state(), [])

    # -- backward ------------------------------------------------------------------------------

    def _finish(self, number: int) -> None:
        """Runs the rest of a micro-batch's forward; its output replaces the last block's."""
        self._randomness.choose(number)
        output, self._outputs[number] = self._outputs[number], None
        event = self._forwards[number].advance(output)
        if isinstance(event, BlockCall):
            name = self._calls.names[event.index]
            raise NotLayerMajor(f"its forward calls '{name}' again, behind the last block")
        self._outputs[number] = event.output

    def _run_losses_back(self) -> None:
        """Runs the rest of each forward, and its loss back to the last block's output.

        One micro-batch after another, so that the logits of only one are alive at a time.
        """
        for number in self._numbers:
            if number:
                self._finish(number)
            output, self._outputs[number] = self._outputs[number], None
            loss = self._weigh(number, output)
            del output
            if self._validation is not None:
                self._validation.loss(loss)
            if loss.grad_fn is not None:
                self._graphs[number].claim_loss(loss.grad_fn)
            self._owner.scale(loss).backward()

    def _back_through(self, index: int, block: Call) -> None:
        """Runs back one block for all micro-batches, then what is between it and the one before."""
        for number in self._numbers:
            self._prefetch(index, number)
            self._compute_again(block, index, number)
        for graph in self._graphs:
            graph.run_back(index - 1)

    def _prefetch(self, index: int, number: int) -> None:
        """Starts to bring back the inputs of this call of a block and of the next ones."""
        if self._store is None:
            return
        for at in range(number, number + 1 + PREFETCHED):
            behind, of = divmod(at, len(self._numbers))
            call = self._saved[index - behind][of] if index >= behind else None
            if call is not None:
                self._store.expect(call.held())

    def _compute_again(self, block: Call, index: int, number: int) -> None:
        saved, self._saved[index][number] = self._saved[index][number], None
        if saved is None or all(t is None or t.gradient is None for t in saved.outputs):
            return
        taken: dict[int, torch.Tensor] = {}

        def give(part: _Input) -> torch.Tensor:
            if id(part) not in taken:
                data = part.held.take()
                taken[id(part)] = data if part.target is None else cut(data, part.target)
            return taken[id(part)]

        args, kwargs = map_leaves(saved.arguments, _Input, give)
        self._randomness.replay(saved.random)
        with saved.autocast.applied():
            output = block(*args, **kwargs)
        found = leaves(output, torch.Tensor)
        if len(found) != len(saved.outputs):
            raise NotLayerMajor(
                f"'{self._calls.names[index]}' returned {len(saved.outputs)} tensors, and "
                f"{len(found)} when it was computed again"
            )
        if self._validation is not None:
            self._validation.second_pass(index, number, found)
        targets = [(out, t) for out, t in zip(found, saved.outputs, strict=True) if t is not None]
        del args, kwargs, output, found
        run_back([out for out, _ in targets], [target for _, target in targets])

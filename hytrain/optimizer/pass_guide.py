"""Turns what the hooks on a model's modules report into waits and gathers of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hytrain.errors import UnsupportedError
from hytrain.model.weight_reads import IN_BACKWARD
from hytrain.optimizer.autograd_task import graph_task, keeps_graph
from hytrain.optimizer.kept_state import KeptState
from hytrain.optimizer.pass_tracker import PassTracker
from hytrain.zero3.layer_weights import LayerWeights
from hytrain.zero3.schedule import ForwardMark

_ONLY_SHARDS = (
    "Under ZeRO-3 a rank has its shards of the weights only: read them on all ranks inside `with "
    "engine.gathered_parameters():`, or call engine.save_16bit_model, engine.module_state_dict or "
    "engine.fp32_state_dict, which gather them"
)


class PassGuide:
    """Gets weights ready when :class:`~hytrain.optimizer.layer_guards.LayerGuards` calls."""

    def __init__(self, passes: PassTracker, kept: KeptState) -> None:
        self.passes = passes
        self.weights = passes.weights
        self._kept = kept

    def begin_forward(self) -> None:
        """Begins the model's forward, which is about to enter its modules."""
        passes, schedule = self.passes, self.weights.active
        if schedule is not None and torch._C._are_functorch_transforms_active():  # pyright: ignore
            raise UnsupportedError(
                "the model is called in a transform of torch.func (grad, vjp, vmap, ...): under "
                "ZeRO-3 weights are gathered for their uses, which a transform does not allow. "
                "torch.autograd.grad(..., create_graph=True) is supported; or use ZeRO-2"
            )
        passes.begin_forward()
        if passes.open_step.layer_major or passes.is_in_graph:
            return
        passes.enter_model()
        if schedule is not None:
            # What is still gathered for a backward, or a forward that raised, is no module's now.
            self.weights.forbid_reads()
            self.weights.settle()  # which may close layers that an unannounced backward left
            for state in passes.pipeline.layers:
                # Weights gathered ahead must not be those that a later step would make.
                if state.update.sent:
                    passes.before_use(state)
            schedule.begin("train" if torch.is_grad_enabled() else "eval")

    def end_forward(self) -> None:
        """Ends the model's forward."""
        passes, schedule = self.passes, self.weights.active
        if schedule is not None and not passes.open_step.layer_major and not passes.is_in_graph:
            schedule.end()
        # Layers that were not used are made ready now: every rank gathers every layer, in one
        # order, and reads of parameters between forward and backward see the newest weights.
        for state in passes.pipeline.layers:
            if state.update.sent or not state.update.waited:
                passes.before_use(state)
        passes.end_forward()

    def enter_forward(self, layers: Sequence[LayerWeights]) -> None:
        """Gets weights ready for a module that begins its forward, perhaps to recompute it."""
        passes = self.passes
        if graph_task() != -1 and not passes.is_in_graph:
            passes.notice_recomputation()
        if self.weights.is_sharded:
            self._enter_sharded(layers)
        else:
            for layer in layers:
                for state in layer.trained:
                    update = state.update
                    if update.sent or not update.waited:
                        passes.before_use(state)  # what was sent is withdrawn
        states = layers[0].trained
        if passes.timer.in_forward and states:
            # The time of other modules counts as that of the layer before them. A block waits for
            # all of its pieces before it begins: its time is the last piece's.
            passes.timer.enter(states[-1].index)

    def _enter_sharded(self, layers: Sequence[LayerWeights]) -> None:
        passes, schedule = self.passes, self.weights.active
        for layer in layers:
            states = layer.trained
            if self.weights.is_suspended:
                self._check_gathered(layer)
            for state in states:
                if state.update.sent or (schedule is None and not state.update.waited):
                    passes.before_use(state)  # what was sent is withdrawn
            if schedule is not None and states:
                on_cpu = any(state.update.updated_by == "cpu" for state in states)
                passes.timer.wait_begins(layer.index, on_cpu=on_cpu)
                schedule.use(layer.index)
                passes.timer.wait_ends(layer.index)
            elif schedule is not None:
                schedule.use(layer.index)
            # Not earlier: on its way to this use the schedule may give the layer up, and gather it
            # anew, if this rank has left out other uses.
            for part in layer.sharded:
                part.allow_reads()

    def _check_gathered(self, layer: LayerWeights) -> None:
        if layer.sharded and not self.weights.gatherer.is_live(layer):
            raise UnsupportedError(
                f"weights of layer '{layer.name}' are used after the hooks that gather them were "
                "removed (optimizer.parameter_offload.forward_hooks): call the model inside `with "
                "deepspeed.zero.GatheredParameters(model.parameters()):`, or "
                "optimizer.parameter_offload._register_deepspeed_module(model) before"
            )

    def leave_forward(self, layers: Sequence[LayerWeights]) -> None:
        """Lets go of the layers' weights: the module's computation is queued."""
        schedule = self.weights.active
        for layer in layers:
            for part in layer.sharded:
                part.disallow_reads()
        if schedule is not None:
            schedule.begun()
            for layer in layers:
                schedule.leave(layer.index)

    def mark_forward(self) -> ForwardMark:
        """The mark of the forward that ends, for its outputs: backward names the forward by it."""
        schedule = self.weights.active
        return ForwardMark() if schedule is None else schedule.mark_forward()

    def backward_begins(self, mark: ForwardMark, _gradient: object) -> None:
        """Notes that autograd has come to the model's output, and begins an unannounced backward.

        The backward of a forward that bypassed the engine was not announced. A held layer must be
        there before the first use that no hook reports; and if a part of the model runs a graph of
        its own (reentrant checkpointing), that graph's end would be taken for the end.
        """
        if not self.passes.is_in_graph:
            self.passes.forward_task = None  # the forward has ended, or a later one has failed
            self.passes.begin_unannounced()
        if self.weights.active is not None:
            self.weights.active.reach(mark, keeps_graph=keeps_graph())

    def needed_in_backward(self, layers: Sequence[LayerWeights]) -> None:
        """Gathers the layers' weights: autograd has come to a module that uses them."""
        schedule = self.weights.active
        if schedule is None:
            return
        if not self.passes.is_in_graph:
            self.passes.begin_unannounced()
        if torch.is_grad_enabled():
            # create_graph: the graph of this backward saves weights, and no hook tells when that
            # graph runs backward. Weights without memory would be read all the same.
            self.weights.hold_all()
        for layer in layers:
            schedule.use(layer.index)
            for part in layer.sharded:  # until it is given up
                part.allow_reads()

    def read_trained(self, layer: LayerWeights) -> None:
        """Makes trained weights that are whole on every rank current for a read by the user's code.

        Several ranks gather what the others have updated: a collective then, as a forward is.

        Raises:
            UnsupportedError: a backward is running, their update has begun and cannot be taken
                back.
            ConfigError: between backward and step, if updates are committed directly.
        """
        passes, schedule = self.passes, self.weights.active
        if schedule is not None and schedule.is_open:
            schedule.hold(layer.index)
        else:
            self.weights.gatherer.start_held()  # all ranks have begun these before
            for state in layer.resident:
                passes.before_use(state)

    def read_sharded(self, layer: LayerWeights, name: str, *, was_read: bool) -> None:
        """Holds a layer that the user's code is about to read outside of its modules (ZeRO-3).

        In a forward the layer stays from now on, in this pass and all later ones, and in their
        backward: no hook reports the use there. A collective: all ranks make the same use.

        Raises:
            UnsupportedError: it is no forward, and they are not gathered; or an extension has
                read them, unnoticed, when they were not there.
        """
        schedule, is_live = self.weights.active, self.weights.gatherer.is_live(layer)
        if was_read and not is_live:
            raise UnsupportedError(
                f"weights of layer '{layer.name}' were read outside of the module that owns them, "
                "by an extension that is given the parameter itself: under ZeRO-3 they are not "
                "there then. Call that module's own forward, or give the extension weight.view_as("
                "weight), which is noticed"
            )
        if self.passes.is_in_graph:
            if is_live:
                return
            if name == IN_BACKWARD:
                raise UnsupportedError(
                    f"backward uses weights of layer '{layer.name}' that are not there: under "
                    "ZeRO-3 they are gathered when backward comes to what their module returned. "
                    "This is not noticed if a module writes its result into its input, or returns "
                    "it in a generator or an object of another class than tuples, lists, sets, "
                    "dicts, namespaces and dataclasses. Return new tensors in one of these, "
                    "or keep such weights whole by a larger "
                    '"zero_optimization.stage3_param_persistence_threshold"'
                )
            raise UnsupportedError(
                f"weights of layer '{layer.name}' are read ({name}) in a backward in which they "
                "are not used by a module: under ZeRO-3 a rank has its shards of them only. Read "
                "them in the model's forward as well, or outside of both inside `with "
                "engine.gathered_parameters():`"
            )
        if schedule is None or not schedule.is_open:
            raise UnsupportedError(
                f"weights of layer '{layer.name}' are read ({name}) outside of the model's "
                f"forward. {_ONLY_SHARDS}"
            )
        self.weights.hold(layer)

    def read_weights(self) -> None:
        """Makes all weights the newest: the model's state dict is about to be made.

        Where weights are not gathered (ZeRO-3), ranks other than 0 get one without values: code
        that saves on rank 0 what accelerate has gathered there also runs on the others, and
        transformers' save_pretrained makes a state dict on them, of which it writes nothing.

        Raises:
            UnsupportedError: this is rank 0, and they are not gathered.
        """
        if self.weights.are_readable:
            self._kept.synchronize()
        elif self._kept.collectives.rank == 0:
            raise UnsupportedError(_ONLY_SHARDS)

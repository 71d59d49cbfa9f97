"""Weights and state between steps: made current, handed out, replaced."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hytrain.comm.exchange import raise_together
from hytrain.engine.open_step import OpenStep
from hytrain.errors import HyTrainError
from hytrain.model.layer_state import LayerState

logger = logging.getLogger(__name__)

_FORMAT = "hytrain_state"
_VERSION = 1


class KeptState(OpenStep):
    """What of an optimizer outlives a step."""

    def synchronize(self) -> None:
        """All weights are the newest: what was previewed but not stepped is withdrawn."""
        self._check_open()
        for state in self.pipeline.layers:
            self.before_use(state)
        self.pipeline.cpu.wait_all()
        self.pipeline.streams.synchronize()

    def finish_weights(self) -> None:
        """Before the end: weights that stay the model's are those of the last step.

        A collective, where some are not yet. That it fails is only warned of.
        """
        if self._closed:
            return
        kept = [state for state in self.pipeline.layers if not state.storage.is_sharded]
        if all(state.waited and not state.sent for state in kept):
            return
        try:
            self.synchronize()
        except HyTrainError as error:
            logger.warning("the model's weights are not those of the last step: %s", error)

    def flush(self) -> None:
        """As :meth:`synchronize`, and every master weight and moment is that of the last step."""
        self.synchronize()
        self.pipeline.flush()

    def forget_gradients(self) -> None:
        """Before state is replaced: nothing of the step so far stays, and nothing is pending."""
        if self.pipeline.norm.settings.direct:
            # Updates are committed as they arrive; what they wrote is about to be replaced.
            self.pipeline.cpu.wait_all()
            for layer in self.layer_states:
                if layer.sent:
                    layer.sent = False
                    layer.gradient = None
                    layer.waited = True
        self.discard_gradients()
        self.pipeline.is_torn = False  # all of it is replaced
        self.flush()

    def publish_masters(self) -> None:
        """The training copy becomes the master weights', on all ranks; a collective."""
        pipeline = self.pipeline
        with torch.no_grad():
            for layer in pipeline.layers:
                for start, weights in layer.storage.shard_slices(layer.begin, layer.end):
                    at = start - layer.begin
                    weights.copy_(layer.master[at : at + weights.numel()])
        # The gather runs beside the compute stream and does not wait for these copies.
        pipeline.streams.synchronize()
        for layer in pipeline.layers:
            layer.waited = False
            layer.gather_due = not layer.storage.is_sharded
            layer.storage.mark_overwritten()
        for weights in self.weights.layers:
            if weights.frozen is not None:
                weights.frozen.storage.mark_overwritten()
        pipeline.wait_all()
        pipeline.streams.synchronize()

    # -- as torch's optimizers ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, as DeepSpeed's ZeRO optimizers give it.

        ``engine.save_checkpoint`` is the better way: what it saves can be loaded on another number
        of ranks, in another layout, and has the rest of the engine.

        Returns:
            Hyper-parameters, step counts, and for each layer this rank's fp32 master weights and
            moments. The tensors are the optimizer's own, as with torch: save or copy them before
            training goes on.

        Raises:
            ConfigError: a backward is running, or updates are committed directly and have begun.
        """
        self.settle_state("state_dict()")
        index, groups = 0, list[dict[str, Any]]()
        for group in self.param_groups:
            numbers = list(range(index, index + len(group["params"])))
            index += len(numbers)
            values = {key: copy.deepcopy(v) for key, v in group.items() if key != "params"}
            groups.append({**values, "params": numbers})
        return {
            _FORMAT: _VERSION,
            "param_groups": groups,
            "steps": list(self.steps),
            "layers": [_pack(layer) for layer in self.layer_states],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restores what :meth:`state_dict` gave on this rank of a job of the same layout.

        A collective. The training copy becomes the master weights'; gradients since the last step
        are forgotten.

        Args:
            state_dict: this rank's, or a sequence with that of every rank, as DeepSpeed takes it.

        Raises:
            CheckpointError: it is something else, or another layout's, on whichever rank; nothing
                was touched.
        """
        found = state_dict
        if not isinstance(found, Mapping):
            found = (
                found[self.collectives.rank] if len(found) == self.collectives.world_size else {}
            )
        failure = self._why_not(found)
        raise_together(failure, self.collectives)
        self.forget_gradients()
        for layer, stored in zip(self.layer_states, found["layers"], strict=True):
            for tensor, kind in zip(_tensors(layer), _KINDS, strict=True):
                tensor.copy_(stored[kind])
        self.steps = [int(step) for step in found["steps"]]
        for group, saved in zip(self.param_groups, found["param_groups"], strict=True):
            group.update({key: copy.deepcopy(v) for key, v in saved.items() if key != "params"})
        self.publish_masters()

    def _why_not(self, found: Mapping[str, Any]) -> str | None:
        """What keeps a state from being loaded; None: nothing."""
        mine = [(layer.name, layer.begin, layer.end) for layer in self.layer_states]
        sizes = [len(group["params"]) for group in self.param_groups]
        if found.get(_FORMAT) != _VERSION:
            seen = "it was not made by the state_dict() of this optimizer, on as many ranks"
        elif [(x["name"], x["begin"], x["end"]) for x in found["layers"]] != mine:
            seen = "its layers or shards are others than this rank's"
        elif [len(group["params"]) for group in found["param_groups"]] != sizes:
            seen = "its parameter groups are others"
        else:
            return None
        return (
            f"the state cannot be loaded: {seen}. optimizer.load_state_dict takes what this rank's "
            "optimizer.state_dict() gave with the same model, groups, ranks and shards; use "
            "engine.save_checkpoint and engine.load_checkpoint to resume in any other layout"
        )


_KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def _tensors(layer: LayerState) -> tuple[torch.Tensor, ...]:
    return layer.master, layer.exp_avg, layer.exp_avg_sq


def _pack(layer: LayerState) -> dict[str, Any]:
    place = {"name": layer.name, "begin": layer.begin, "end": layer.end}
    return {**place, **dict(zip(_KINDS, _tensors(layer), strict=True))}

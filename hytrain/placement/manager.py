"""Measures the real steps and lets the controller place the layers by what it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hytrain import _C
from hytrain.config import SolverConfig
from hytrain.cost.step import StepCosts
from hytrain.errors import ConfigError
from hytrain.hardware.host_share import HostShare
from hytrain.kernels.clipping import Outcome
from hytrain.offload.threads import ThreadChoice
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.placement.allocator_watch import AllocatorWatch, retries_of
from hytrain.placement.controller import PlacementController
from hytrain.placement.current_limits import CurrentLimits
from hytrain.placement.measure import MANY_STEPS, CostEstimator
from hytrain.placement.memory import state_bytes
from hytrain.placement.memory_probe import LOOK_EVERY, MemoryProbe
from hytrain.placement.memory_report import check_fits
from hytrain.placement.peak_memory import PeakMemoryInputs, PhasePeak, predict_peaks
from hytrain.placement.records import Decision
from hytrain.placement.solve_schedule import SolveSchedule
from hytrain.placement.step_timer import StepTimer
from hytrain.placement.threads import TunedThreads


class PlacementManager:
    """Follows every step of an optimizer; moves layers where the controller decides so."""

    def __init__(
        self,
        pipeline: UpdatePipeline,
        controller: PlacementController,
        estimator: CostEstimator,
        solver: SolverConfig,
        host: HostShare,
        peak_inputs: Callable[[int], PeakMemoryInputs],
        threads: ThreadChoice,
        tuned_threads: TunedThreads | None = None,
    ) -> None:
        self._pipeline = pipeline
        self.controller = controller
        self._first = controller.decisions[0]
        self._bytes = self._first.layer_bytes
        self._estimator = estimator
        self.host = host
        """This rank's part of its host."""
        self._peak_inputs = peak_inputs
        self.threads = threads
        """The threads of the CPU's updates."""
        estimator.update_threads = threads.num_threads
        self.timer = StepTimer(len(pipeline.layers), pipeline.streams.device)
        pipeline.observer = self.timer
        self._probe = MemoryProbe(self._bytes, pipeline.streams.device, pipeline.room.kept)
        self._allocator = AllocatorWatch(retries_of(pipeline.streams.device))
        self._probing = False
        self._limits = CurrentLimits(
            self._probe, solver, self._first.limits, host, lambda: self.host_bytes
        )
        self._schedule = SolveSchedule(controller, estimator, self._limits.at)
        self.tuned_threads = tuned_threads
        """Tries numbers of threads; None: the number is fixed."""

    def memory_peaks(self) -> dict[str, PhasePeak]:
        """What each phase takes at most where the layers are now; see :func:`predict_peaks`."""
        inputs = self._peak_inputs(self.controller.num_gpu_layers)
        return predict_peaks(replace(inputs, layers=self.controller.layer_bytes))

    # -- through a step ------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The last micro-batch's backward begins."""
        self.timer.begin_backward()
        self._watch_room()
        schedule = self._schedule
        self._probing = self._probe.wanted and (
            schedule.measured_since <= MANY_STEPS or schedule.steps % (2 * LOOK_EVERY) == 0
        )
        if self._probing:
            self._probe.begin_backward()

    def _watch_room(self) -> None:
        """Has the passes wait for the worker before the plan's reserve is touched."""
        if not self._probe.wanted:
            return
        probe, room = self._probe, self._pipeline.room
        all_there = self.controller.num_gpu_layers == len(self._bytes)
        # With direct commit no gradient is planned to stay until the step, but in the first
        # backward all of them do if there is room: the collector asks for that.
        if all_there and self._bytes[0].keeps_pending:
            room.stop()  # without asking for limits, which takes the host a while
        elif (limits := self._limits.at(self._schedule.steps)).gpu is not None:
            room.begin_step(limits.gpu, limits.gpu_reserve, probe.transient, probe.growth)

    def gradient(self, index: int) -> None:
        """A layer's final gradient has been handed over."""
        room = self._pipeline.room
        if room.is_watching and room.is_short:
            with self.timer.host_waits():
                self._pipeline.wait_for_room(self._pipeline.layers[index])
        if self.timer.measures:
            self.timer.gradient(index)
        if self._probing:
            self._probe.gradient(index, self._pipeline.waiting_on_device, room.in_flight)

    def end_backward(self, num_firings: int) -> None:
        """Every layer's gradient has been handed over; the outcome is being computed.

        Decisions are made here: usually hidden, but in launch-bound steps the GPU waits for them.

        ``num_firings``: how many gradients autograd has handed over so far.
        """
        self.timer.end_backward()
        self._pipeline.room.end_backward()
        self._schedule.see_firings(num_firings)
        estimator, controller = self._estimator, self.controller
        samples = self.timer.take()
        if self.tuned_threads is not None and self.tuned_threads.is_trying:
            # Times with other numbers of threads than the one that will be kept.
            self._pipeline.cpu.worker.take_spans()
            return
        if samples:
            self._schedule.add_samples(samples)
        spans = self._pipeline.cpu.worker.take_spans()
        if not controller.streams:  # the worker numbers its own layers
            estimator.add_spans(spans)
        if estimator.num_samples:
            self._pipeline.updates_leave_room = estimator.launch_bound
        self._schedule.consider()

    @property
    def host_bytes(self) -> int:
        """Bytes of state and pinned memory that this rank has on the host."""
        state = (x.state_bytes for x in self._pipeline.layers if x.placement != "gpu")
        return sum(state) + self._pipeline.cpu.pinned.num_bytes

    def end_step(self, outcome: Outcome | None, statistics: _C.WorkerStatistics) -> None:
        """The step is final: layers may move."""
        self._estimator.add_copies(statistics)
        if outcome is None or not outcome.skip:
            clipped = outcome is not None and outcome.coefficient < 1.0
            self._estimator.add_outcome(clipped=clipped)
        controller, schedule = self.controller, self._schedule
        if self._probing:
            moving = self._pipeline.mover.bytes_leaving_device
            self._probe.end_step(controller.num_gpu_layers, moving)
            self._limits.add_measured()
        schedule.steps += 1
        self.timer.end_step(measure_next=schedule.measures_next())
        controller.apply_moves(schedule.steps)
        self._allocator.after_step(schedule.steps)
        is_settled = controller.moves.is_settled
        ready = is_settled and controller.num_gpu_layers < len(self._bytes)
        if self.tuned_threads is not None and self.tuned_threads.end_step(ready=ready):
            self.threads = replace(self.threads, num_threads=self.tuned_threads.trials.chosen)
            self._estimator.update_threads = self.threads.num_threads
            schedule.measured_since = 0  # times are others from here on
            self._estimator.forget_earlier()
        if not is_settled:
            self._limits.forget()
            self._estimator.forget_earlier()

    # -- by hand -------------------------------------------------------------------------------

    def set_gpu_fraction(self, value: float | str) -> None:
        """Places the first ``round(value * L)`` layers on the GPU; "solve" lets the solver decide.

        Raises:
            ConfigError: the number is not in [0, 1], or the placement does not fit.
            MemoryBudgetError: none fits.
        """
        controller = self.controller
        if value == "solve":
            controller.solves = True
            return
        if isinstance(value, str) or not 0.0 <= value <= 1.0:
            raise ConfigError(f'gpu_fraction must be "solve" or a number in [0, 1], got {value}')
        number = round(value * len(self._bytes))
        limits = self._limits.at(self._schedule.steps)
        allowed = check_fits(self._bytes, limits, self._first.staging_bytes)
        if not allowed.allow(number):
            raise ConfigError(
                f"gpu_fraction {value} means {number} of {len(self._bytes)} layers, but between "
                f"{allowed.min_gpu_layers} and {allowed.max_gpu_layers} fit in memory: choose one "
                "of these, or smaller reserves"
            )
        controller.solves = False
        reason = f"gpu_fraction {value} was set"
        controller.decide(
            self._schedule.steps, number, reason, decider="user", bounds=allowed, limits=limits
        )
        controller.apply_moves(self._schedule.steps, at_once=True)

    def free_gpu_memory(self, *, may_move: bool, where: str, again: str) -> str:
        """Frees device memory, if it can, after an allocation of the user's has failed.

        The allocation cannot be repeated here.

        Args:
            may_move: whether no step is under way.
            where: where it failed, for people.
            again: what can be repeated, for people.

        Returns:
            What was done and what can be done, for people.
        """
        controller = self.controller
        here = controller.num_gpu_layers
        held = state_bytes(self._bytes[:here])
        text = (
            f"hytrain keeps the optimizer state of {here} of {len(self._bytes)} layers on this GPU "
            f"({held / 2**30:.2f} GiB). An allocation that fails in {where} cannot be undone: that "
            'is what "hytrain.solver.gpu_memory_reserve_bytes" is for. '
        )
        if not controller.solves:
            return text + 'A smaller "hytrain.gpu_fraction" or micro-batch frees memory'
        step = self._schedule.steps
        if not may_move or not controller.retreat(step, self._limits.at(step)):
            return text + (
                "A larger reserve, a smaller micro-batch or checkpointing frees memory, and where "
                "much memory is reserved but unallocated, "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
        self._pipeline.mover.finish()
        self._limits.forget()
        return text + (
            f"Now {controller.num_gpu_layers} layers are left there, and as many at most for the "
            f"next steps: repeat {again}"
        )

    def resume(self, step: int, history: Sequence[Decision]) -> None:
        """Continues from a checkpoint: steps are counted from there.

        ``history``: decisions that the checkpoint keeps; they come before this run's.
        """
        self._limits.forget()
        self._schedule.resume(step)
        self.controller.resume(step, history)

    def costs(self) -> StepCosts | None:
        """What the last steps took; None before any was measured, and with streamed updates."""
        costs = None if self.controller.streams else self._estimator.costs()
        return costs and self.controller.with_late(costs, self._limits.at(self._schedule.steps))

    @property
    def decisions(self) -> list[Decision]:
        """All decisions so far, the one before the first step included."""
        return self.controller.decisions

"""The compiled extension: kernels on addresses and sizes. Nothing here checks its arguments."""

from collections.abc import Callable
from typing import Any, ClassVar

# ---- adam: csrc/include/hytrain/adam.h, dispatch.h ----

class DType:
    float32: DType
    bfloat16: DType
    float16: DType
    bfloat16_away: DType

class MomentKind:
    float32: MomentKind
    bfloat16: MomentKind
    eight_bit: MomentKind

class MomentRun:
    def __init__(self, begin: int, parameter: int, first_index: int) -> None: ...

class Moments:
    def __init__(
        self,
        kind: MomentKind,
        m: int,
        v: int,
        m_exponents: int = 0,
        v_exponents: int = 0,
        seed: int = 0,
        runs: list[MomentRun] = ...,
    ) -> None: ...

moment_block: int

class AdamHyper:
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        decoupled_decay: bool,
        bias_correction: bool,
    ) -> None: ...

class GradientStep:
    def __init__(self, gradient: int, dtype: DType, scale: float, hyper: AdamHyper) -> None: ...

class Outgoing:
    def __init__(self, data: int, dtype: DType, non_temporal: bool) -> None: ...

def commit(
    p: int, moments: Moments, n: int, step: GradientStep, out: Outgoing, num_threads: int
) -> None: ...
def commit_split(
    copy: int,
    remainder: int,
    moments: Moments,
    n: int,
    step: GradientStep,
    num_threads: int,
) -> None: ...
def preview(
    p: int, moments: Moments, n: int, step: GradientStep, out: Outgoing, num_threads: int
) -> None: ...
def commit_then_preview(
    p: int,
    moments: Moments,
    n: int,
    previous: GradientStep,
    current: GradientStep,
    out: Outgoing,
    num_threads: int,
) -> None: ...
def publish(p: int, n: int, out: Outgoing, num_threads: int) -> None: ...
def sum_of_squares(data: int, dtype: DType, n: int, num_threads: int) -> float: ...
def read_write(p: int, moments: Moments, n: int, num_threads: int) -> None: ...
def available_isas() -> list[str]: ...
def active_isa() -> str: ...
def set_isa(name: str) -> None: ...
def openmp_library() -> str: ...

class Tuning:
    def __init__(
        self, prefetch_elements: int, block_elements: int, dynamic_schedule: bool
    ) -> None: ...
    @property
    def prefetch_elements(self) -> int: ...
    @property
    def block_elements(self) -> int: ...
    @property
    def dynamic_schedule(self) -> bool: ...

def tuning() -> Tuning: ...
def set_tuning(tuning: Tuning) -> None: ...

# ---- offload: csrc/include/hytrain/update_worker.h ----

def touch(memory: int, bytes: int, num_threads: int) -> None: ...

class Pass:
    update: Pass
    direct: Pass
    late: Pass
    preview: Pass
    commit: Pass
    settle: Pass
    publish: Pass
    drop: Pass
    withdraw: Pass
    leave: Pass
    arrive: Pass
    capture: Pass

class StateArrays:
    def __init__(
        self,
        p: int = 0,
        m: int = 0,
        v: int = 0,
        kind: MomentKind = ...,
        m_exponents: int = 0,
        v_exponents: int = 0,
        seed: int = 0,
        split: bool = False,
    ) -> None: ...

class Chunk:
    def __init__(
        self,
        *,
        n: int,
        shard_offset: int,
        weights: int,
        weights_dtype: DType,
        group: int,
        slot_class: int,
        weights_on_host: bool = False,
        runs: list[MomentRun] = ...,
    ) -> None: ...

class StepRecord:
    def __init__(self, scale: float, hyper: list[AdamHyper]) -> None: ...

class JobSpan:
    layer: int
    job_pass: Pass
    begin_ns: int
    end_ns: int
    kernel_ns: int
    wait_gradient_ns: int
    final: bool
    committed: bool

class WorkerStatistics:
    kernel_ns: int
    wait_gradient_ns: int
    wait_outgoing_ns: int
    issue_ns: int
    elements: int
    jobs: int
    to_host_ns: int
    to_host_bytes: int
    to_device_ns: int
    to_device_bytes: int

class SpanKind:
    preview: ClassVar[SpanKind]
    commit: ClassVar[SpanKind]
    commit_then_preview: ClassVar[SpanKind]
    publish: ClassVar[SpanKind]
    gradient_to_host: ClassVar[SpanKind]
    gradient_to_device: ClassVar[SpanKind]
    weights_to_device: ClassVar[SpanKind]
    state_to_host: ClassVar[SpanKind]
    state_to_device: ClassVar[SpanKind]
    weights_to_host: ClassVar[SpanKind]
    name: str

class TraceSpan:
    kind: SpanKind
    thread: int
    layer: int
    chunk: int
    step: int
    begin_ns: int
    end_ns: int
    bytes: int
    elements: int
    slot: int

class UpdateWorker:
    @staticmethod
    def on_host(num_threads: int, delay_seed: int, max_delay_us: int) -> UpdateWorker: ...
    @staticmethod
    def on_cuda(
        ordinal: int,
        to_host: int,
        to_device: int,
        num_threads: int,
        delay_seed: int,
        max_delay_us: int,
    ) -> UpdateWorker: ...
    outgoing: ClassVar[int]
    def add_slot_class(self, slot_bytes: int) -> int: ...
    def add_slots(self, slot_class: int, base: int, slot_bytes: int, count: int) -> None: ...
    def retire_slots(self, slot_class: int, base: int, num_bytes: int) -> None: ...
    def is_retiring(self, base: int) -> bool: ...
    def add_layer(
        self,
        name: str,
        gradient_dtype: DType,
        ready: int,
        norm_slot: int,
        state: StateArrays,
        chunks: list[Chunk],
    ) -> int: ...
    def move_weights(self, layer: int, addresses: list[int]) -> None: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def begin_step(self, sum_of_squares_limit: float) -> None: ...
    def submit_update(
        self,
        layer: int,
        gradient: int,
        gradient_ready: int,
        sum_of_squares: int,
        record: StepRecord,
        direct: bool,
    ) -> None: ...
    def submit(
        self, layer: int, job_pass: Pass, withdraw_to: int = 0, withdraw_ready: int = 0
    ) -> None: ...
    def submit_leave(self, layer: int, device: StateArrays, ready: int, moved: int) -> None: ...
    def submit_arrive(
        self, layer: int, host: StateArrays, device: StateArrays, ready: int
    ) -> None: ...
    def wait_moved(self, layer: int) -> None: ...
    def is_moving(self, layer: int) -> bool: ...
    def cancel_update(self, layer: int) -> bool: ...
    def finalize(self, record: StepRecord) -> int: ...
    def wait_issued(self, layer: int) -> None: ...
    def wait_complete(self, layer: int) -> None: ...
    def wait_all(self) -> None: ...
    def wait_fetched(self, layers: list[int]) -> None: ...
    def is_fetched(self, layer: int) -> bool: ...
    def has_pending(self, layer: int) -> bool: ...
    def wait_settled(self, layer: int) -> None: ...
    def capture(self, layer: int, target: StateArrays) -> None: ...
    def wait_captured(self, layer: int) -> None: ...
    def forget_capture(self, layer: int) -> None: ...
    def check_error(self) -> None: ...
    def on_stall(self, after_seconds: float, report: Callable[[str], None]) -> None: ...
    def take_statistics(self) -> WorkerStatistics: ...
    def take_spans(self) -> list[JobSpan]: ...
    def set_num_threads(self, num_threads: int) -> None: ...
    def start_trace(self, capacity: int, threads: bool) -> None: ...
    def wait_traced(self) -> None: ...
    def stop_trace(self) -> None: ...
    def set_trace_step(self, step: int) -> None: ...
    def set_trace_anchor(self, anchor: int, at_ns: int) -> None: ...
    def take_trace(self) -> tuple[list[TraceSpan], int]: ...
    def fail_at(self, layer: int) -> None: ...

# ---- checkpoint: csrc/include/hytrain/crc32.h, summed_file.h ----

def crc32(sum: int, data: int, bytes: int) -> int: ...
def trim_write_buffers() -> None: ...

class SummedFile:
    num_bytes: int
    def __init__(self, descriptor: int) -> None: ...
    def write(self, data: int, bytes: int) -> int: ...
    def flush(self) -> None: ...
    def sums(self) -> list[int]: ...

# ---- modules: csrc/bindings/same_modules.cpp ----

def same_entries(
    dicts: list[dict[str, Any]], sizes: bytes, entries: tuple[object, ...]
) -> bool: ...
def same_types(
    objects: list[Any], types: tuple[type, ...], attributes: list[dict[str, Any]], absent: str
) -> bool: ...
def same_attributes(objects: list[Any], name: str, had: tuple[object, ...]) -> bool: ...
def same_sets(sets: list[set[str]], had: tuple[frozenset[str], ...]) -> bool: ...

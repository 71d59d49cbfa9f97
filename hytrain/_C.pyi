"""The compiled extension: kernels on addresses and sizes. Nothing here checks its arguments."""

# ---- adam: csrc/include/hytrain/adam.h, dispatch.h ----

class DType:
    float32: DType
    bfloat16: DType
    float16: DType

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
    p: int, m: int, v: int, n: int, step: GradientStep, out: Outgoing, num_threads: int
) -> None: ...
def preview(
    p: int, m: int, v: int, n: int, step: GradientStep, out: Outgoing, num_threads: int
) -> None: ...
def commit_then_preview(
    p: int,
    m: int,
    v: int,
    n: int,
    previous: GradientStep,
    current: GradientStep,
    out: Outgoing,
    num_threads: int,
) -> None: ...
def publish(p: int, n: int, out: Outgoing, num_threads: int) -> None: ...
def sum_of_squares(data: int, dtype: DType, n: int, num_threads: int) -> float: ...
def read_write(p: int, m: int, v: int, n: int, num_threads: int) -> None: ...
def available_isas() -> list[str]: ...
def active_isa() -> str: ...
def set_isa(name: str) -> None: ...

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

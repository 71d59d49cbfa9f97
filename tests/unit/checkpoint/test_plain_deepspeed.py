"""A checkpoint resumes in plain DeepSpeed, told to load a universal one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.comparisons import assert_same_states
from support.engines import device
from support.plain_deepspeed import plain_engine, plain_state
from support.resume import GLOBAL_BATCH, WARMUP, Everything, Run, engine_of, snapshot, train

from hytrain.checkpoint.files_beside import NOTE

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.filterwarnings("ignore:.*reduce_scatter")
@pytest.mark.parametrize(
    ("bf16", "stage", "is_linked"), [(True, 2, False), (False, 1, True), (True, 3, False)]
)
def test_state_is_the_same_and_training_goes_on(
    bf16: bool, stage: int, is_linked: bool, tmp_path: Path
) -> None:
    with engine_of(Run(bf16=bf16)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path, tag="step3")
        if is_linked:  # in the place of what DeepSpeed's ds_to_universal would make
            subprocess.run(
                ["cp", "-al", tmp_path / "step3", tmp_path / "step3_universal"], check=True
            )
        saved = snapshot(engine)
        losses = train(engine, 3, 6)
    plain = plain_engine(
        Everything(),
        stage,
        lr=7.0,
        train_micro_batch_size_per_gpu=GLOBAL_BATCH,
        bf16={"enabled": bf16},
        gradient_clipping=0.5,
        checkpoint={"load_universal": True},
        scheduler=WARMUP,
    )
    path, _ = plain.load_checkpoint(str(tmp_path), tag="step3_universal" if is_linked else None)
    assert path is not None
    assert plain.global_steps == 3
    assert_same_states(plain_state(plain), saved.state)
    assert plain.optimizer.param_groups[0]["weight_decay"] == 0.1
    # Plain DeepSpeed leaves out buffers and frozen weights when it loads a universal checkpoint.
    rest = {name: saved.weights[name] for name in ("calls", "frozen.weight", "frozen.bias")}
    plain.module.load_state_dict({k: v.to(device()) for k, v in rest.items()}, strict=False)
    assert train(plain, 3, 6) == pytest.approx(losses, rel=1e-2 if bf16 else 1e-5)


@pytest.mark.parametrize(
    ("stage", "kind", "message"),
    [(2, FileNotFoundError, "optim_states.pt"), (3, RuntimeError, "Missing key")],
)
def test_without_the_key_the_note_beside_it_has_what_to_do(
    stage: int, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    """The error is plain DeepSpeed's own, which cannot name the key: the note quotes it."""
    with engine_of(Run(bf16=False, stage=stage)) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
    plain = plain_engine(Everything(), stage, train_micro_batch_size_per_gpu=GLOBAL_BATCH)
    with pytest.raises(kind, match=message):
        plain.load_checkpoint(str(tmp_path))
    plain.destroy()
    note = (tmp_path / NOTE).read_text()
    assert '"checkpoint": {"load_universal": true}' in note
    assert kind.__name__ in note
    assert message in note
    script = (tmp_path / "zero_to_fp32.py").read_text()
    assert '"checkpoint": {"load_universal": true}' in script

"""What is put beside checkpoints, in their folder: the script and the note that users look for."""

from __future__ import annotations

from pathlib import Path

SCRIPT = Path(__file__).with_name("zero_to_fp32.py")
"""A copy of it is beside the checkpoints."""
NOTE = "hytrain_README.txt"
NAMES = (SCRIPT.name, NOTE)
NOTE_TEXT = """\
The checkpoints in this folder are hytrain's, in DeepSpeed's universal format.

Resume with hytrain:      engine.load_checkpoint(this folder)
Resume in plain DeepSpeed (ZeRO 1, 2 and 3): its JSON needs
                          "checkpoint": {"load_universal": true}
    Without that key it looks for shards of its own format, and ends with
        FileNotFoundError: ... zero_pp_rank_0_mp_rank_00_optim_states.pt     (ZeRO 1 and 2)
        RuntimeError: ... Missing key(s) in state_dict                       (ZeRO 3)
    ds_to_universal is not needed, and cannot read them: they are universal already.
Weights for other programs:  python zero_to_fp32.py . OUTPUT_DIR, or hytrain export
Which there are, and are they whole:  hytrain checkpoint info|verify
"""


def contents() -> dict[str, bytes]:
    """Name in the folder of checkpoints -> contents.

    Raises:
        OSError: the script is not where hytrain is installed.
    """
    return {SCRIPT.name: SCRIPT.read_bytes(), NOTE: NOTE_TEXT.encode()}

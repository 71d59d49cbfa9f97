"""What is put beside checkpoints, in their folder: the script and the note that users look for."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

from hytrain.checkpoint.summed_files import write_file

logger = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("zero_to_fp32.py")
NOTE = "hytrain_README.txt"
NAMES = (_SCRIPT.name, NOTE)
_NOTE_TEXT = """\
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


def put_beside(save_dir: Path) -> None:
    """Writes this version's script and note, for users of DeepSpeed; does not raise."""
    try:
        contents = {_SCRIPT.name: _SCRIPT.read_bytes(), NOTE: _NOTE_TEXT.encode()}
        for name, content in contents.items():
            path = save_dir / name
            if not path.is_file() or path.read_bytes() != content:
                write_file(path, content)
                if path.suffix == ".py":
                    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    except OSError as error:
        # The checkpoint is whole without them.
        logger.warning("README and scripts could not be written to %s: %s", save_dir, error)

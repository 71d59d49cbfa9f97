"""Reads a model's configuration file without torch, so that a wrong path is reported at once."""

from __future__ import annotations

from pathlib import Path

from hytrain.errors import ConfigError


def read_model_file(path: Path) -> tuple[Path, bytes]:
    """The ``config.json`` that ``--model`` gives (the file or its folder), and its content.

    Raises:
        ConfigError: it cannot be read, for example if the name of a model is given.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        return file, file.read_bytes()
    except OSError as error:
        is_name = len(path.parts) == 2 and path.suffix != ".json" and not path.is_absolute()
        name, folder = (path, path.name) if is_name else ("NAME", "DIR")
        raise ConfigError(
            f"cannot read --model {file} ({error.strerror}): nothing is downloaded: give a "
            f"transformers config.json or its folder, as from `hf download {name} config.json "
            f"--local-dir {folder}`"
        ) from error

"""Draws the pictures of docs/pictures: python docs/generate/pictures.py

They have a light background of their own, so that they can be read on light and on dark pages; bar
charts come in a light and a dark version.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
FORWARD, BACKWARD, COPY, CPU, BACK, GPU = (
    "#4c78a8",
    "#335880",
    "#f2a65a",
    "#e45756",
    "#54a24b",
    "#72b7b2",
)
INK, PALE = "#333333", "#666666"


class Picture:
    """A picture of boxes, lines and words, in pixels."""

    def __init__(self, width: int, height: int, ground: str = "#ffffff") -> None:
        self._size, self._ground = (width, height), ground
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        *,
        ink: str = "#ffffff",
        edge: str = "#ffffff",
    ) -> None:
        """Adds a box with words in its middle; line breaks separate lines."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{edge}"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            at = y + height / 2 + 4.5 + 16 * (number - (len(lines) - 1) / 2)
            self.words(x + width / 2, at, line, ink=ink, middle=True)

    def words(
        self, x: float, y: float, text: str, *, ink: str = INK, middle: bool = False, size: int = 13
    ) -> None:
        """Adds one line of words."""
        anchor = ' text-anchor="middle"' if middle else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{ink}" font-size="{size}"{anchor}>'
            f"{escape(text)}</text>"
        )

    def line(self, *points: tuple[float, float], ink: str = "#999999", arrow: bool = False) -> None:
        """Adds a line through points; ``arrow``: with an arrow at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#end)"' if arrow else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.5"{end}/>'
        )

    def write(self, name: str) -> None:
        """Writes the file."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif">\n'
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#777777"/></marker>'
            f'</defs>\n<rect width="{width}" height="{height}" rx="6" fill="{self._ground}"/>\n'
        )
        text = head + "\n".join(self._parts) + "\n</svg>\n"
        (FOLDER / name).write_text(text, encoding="utf-8")


def preview_and_commit() -> None:
    """Draws what is read and written of one layer over two steps."""
    picture = Picture(860, 312)
    for x, title in ((160, "step t, backward"), (400, "step t, norm known"), (640, "step t+1")):
        picture.words(x + 90, 28, title, middle=True)
    for y, title in ((44, "clip coefficient 1"), (128, "clipped"), (212, "skipped")):
        picture.words(12, y + 28, title)
        picture.line((12, y + 66), (848, y + 66), ink="#dddddd")
    for y in (44, 128, 212):
        picture.box(160, y, 180, 50, CPU, "preview\nstate untouched")
        picture.line((340, y + 25), (398, y + 25), arrow=True)
        picture.line((580, y + 25), (638, y + 25), arrow=True)
    picture.box(400, 44, 180, 50, "#eeeeee", "nothing to do", ink=INK, edge="#bbbbbb")
    picture.box(640, 44, 200, 50, CPU, "commit t, preview t+1\nin one sweep")
    picture.box(400, 128, 180, 50, CPU, "preview again,\nwith the coefficient")
    picture.box(640, 128, 200, 50, CPU, "commit t, preview t+1\nin one sweep")
    picture.box(400, 212, 180, 50, BACK, "publish: old weights\ngo out once more")
    picture.box(640, 212, 200, 50, CPU, "preview t+1:\nstep t never happened")
    picture.words(
        12, 300, "fp32 state is written only by a commit, whose scale is known by then", ink=PALE
    )
    picture.write("preview_commit.svg")


def share_on_gpu() -> None:
    """Draws the measured sweep of experiments/solve_k, run 3 of 2026-11-21."""
    measured = {
        0: 0.588,
        3: 0.552,
        5: 0.485,
        8: 0.427,
        10: 0.373,
        11: 0.359,
        12: 0.344,
        13: 0.344,
        16: 0.345,
        18: 0.344,
        21: 0.346,
        23: 0.347,
        26: 0.349,
    }
    picture = Picture(860, 330)
    left, bottom, scale = 80.0, 270.0, 380.0

    def at(layers: float, seconds: float) -> tuple[float, float]:
        return left + layers * 28, bottom - seconds * scale

    for tick in (0.0, 0.2, 0.4, 0.6):
        y = at(0, tick)[1]
        picture.line((left, y), (left + 740, y), ink="#e4e4e4")
        picture.words(left - 40, y + 4, f"{tick:.1f} s", ink=PALE)
    for layers in range(0, 27, 2):
        picture.words(at(layers, 0)[0], bottom + 20, str(layers), ink=PALE, middle=True)
    floor = at(0, 0.327)[1]
    picture.line((left, floor), (left + 740, floor), ink=FORWARD)
    picture.words(left + 540, floor + 18, "forward and backward only", ink=FORWARD)
    picture.line(*(at(*point) for point in measured.items()), ink=CPU)
    for point in measured.items():
        x, y = at(*point)
        is_solved = point[0] == 12
        size = 12 if is_solved else 8
        picture.box(x - size / 2, y - size / 2, size, size, BACK if is_solved else CPU)
    x, y = at(12, 0.344)
    picture.words(x, y + 34, "solved: 12 of 26 layers", ink="#2f7a28", middle=True)
    picture.words(left + 40, 30, "the CPU is the bottleneck", ink=PALE)
    picture.words(left + 410, 104, "the update hides; more layers cost GPU memory only", ink=PALE)
    picture.words(left + 364, bottom + 44, "layers updated on the GPU", middle=True)
    picture.write("share_on_gpu.svg")


def layer_major() -> None:
    """Draws which piece is computed when, in both modes."""
    picture = Picture(860, 300)
    names = (("one micro-batch after another", 20), ("layer by layer", 160))
    shades = ("#23405f", "#335880", "#4c78a8", "#7fa3c7")
    picture.line((654, 40), (654, 262), ink="#777777")
    for name, y in names:
        is_by_layer = y > 100
        picture.words(12, y + 14, name)
        picture.words(12, y + 44, "backward")
        picture.words(12, y + 80, "CPU Adam")
        for number in range(16):
            batch, layer = (number % 4, 3 - number // 4) if is_by_layer else divmod(number, 4)
            if not is_by_layer:
                layer = 3 - layer
            picture.box(110 + number * 34, y + 26, 34, 28, shades[batch], f"L{layer + 1}")
        # A layer can be updated once its last micro-batch is done.
        starts = [4 * (n + 1) for n in range(4)] if is_by_layer else [13 + n for n in range(4)]
        free = 0.0
        for layer, start in zip((4, 3, 2, 1), starts, strict=True):
            begin = max(free, start)
            free = begin + 1.9
            picture.box(110 + begin * 34, y + 62, 64, 26, CPU, f"u{layer}")
    picture.words(654, 282, "end of backward", middle=True, ink=PALE)
    picture.words(
        12,
        282,
        "one shade a micro-batch; a layer's update waits for its last micro-batch",
        ink=PALE,
    )
    picture.write("layer_major.svg")


def threads() -> None:
    """Draws threads, streams and queues of one rank."""
    picture = Picture(860, 390)
    for x, title, width in (
        (20, "host threads", 250),
        (310, "queues", 200),
        (550, "GPU streams", 290),
    ):
        picture.box(x, 16, width, 350, "#f6f7f9", edge="#d5d9de")
        picture.words(x + 12, 38, title, ink=PALE)
    picture.box(40, 56, 210, 56, FORWARD, "training thread\nforward, step()")
    picture.box(40, 136, 210, 56, BACKWARD, "autograd thread\nhooks: record, enqueue")
    picture.box(40, 216, 210, 56, CPU, "update worker (C++)\ncopies, kernel, no Python")
    picture.box(40, 296, 210, 50, "#888888", "watch and store\nother ranks alive?")
    picture.box(330, 136, 160, 56, COPY, "layers whose\ngradient is final", ink=INK)
    picture.box(330, 216, 160, 56, COPY, "pinned slots\na few chunks", ink=INK)
    picture.box(330, 56, 160, 56, "#dfe6ee", "events: a layer's\nnew weights are there", ink=INK)
    picture.box(570, 56, 250, 50, FORWARD, "compute: forward, backward")
    picture.box(570, 118, 250, 40, "#8c6bb1", "communication: reduce, gather")
    picture.box(570, 170, 250, 40, GPU, "GPU update of the first layers")
    picture.box(570, 222, 250, 40, COPY, "to host: gradients", ink=INK)
    picture.box(570, 274, 250, 40, BACK, "to GPU: new weights")
    picture.line((250, 164), (328, 164), arrow=True)
    picture.line((410, 192), (410, 205), (290, 205), (290, 236), (252, 236), arrow=True)
    picture.line((250, 252), (328, 252), arrow=True)
    picture.line((490, 240), (568, 240), arrow=True)
    picture.line((490, 256), (530, 256), (530, 294), (568, 294), arrow=True)
    picture.line((568, 302), (516, 302), (516, 84), (492, 84), arrow=True)
    picture.line((328, 84), (252, 84), arrow=True)
    picture.words(570, 346, "the worker issues copies, and no collective", ink=PALE)
    picture.write("threads.svg")


def life_of_a_gradient() -> None:
    """Draws the way of a CPU-placed layer's gradient in a step."""
    picture = Picture(860, 250)
    steps = (
        ("autograd hook", "taken over,\nnot added", BACKWARD),
        ("last one fired", "the layer's\ngradient is final", BACKWARD),
        ("several ranks", "reduced to\nthis rank's shard", "#8c6bb1"),
        ("norm", "squares summed\non the GPU", "#8c6bb1"),
        ("copy", "chunk by chunk\nto pinned slots", COPY),
    )
    for number, (title, text, fill) in enumerate(steps):
        x = 20 + number * 168
        picture.words(x + 72, 28, title, ink=PALE, middle=True)
        picture.box(x, 40, 144, 54, fill, text, ink=INK if fill == COPY else "#ffffff")
        if number:
            picture.line((x - 24, 67), (x - 2, 67), arrow=True)
    later = (
        ("worker", "commit of t-1 and\npreview of t", CPU),
        ("copy", "new weights\nto the GPU", BACK),
        ("step()", "coefficient of all\nranks; pending", "#888888"),
        ("next forward", "waits for this\nlayer only", FORWARD),
        ("step t+1", "the pending gradient\nis committed", CPU),
    )
    for number, (title, text, fill) in enumerate(later):
        x = 20 + number * 168
        picture.words(x + 72, 148, title, ink=PALE, middle=True)
        picture.box(x, 160, 144, 54, fill, text)
        if number:
            picture.line((x - 24, 187), (x - 2, 187), arrow=True)
    picture.line((764, 94), (764, 116), (92, 116), (92, 132), arrow=True)
    picture.words(
        20,
        240,
        "where the step is clipped, the preview and its copy are made again after step()",
        ink=PALE,
    )
    picture.write("gradient.svg")


def _section(heading: str) -> str:
    page = (FOLDER.parent / "benchmarks.md").read_text(encoding="utf-8")
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def headline() -> tuple[str, list[tuple[str, float, str, str]]]:
    """Reads docs/benchmarks.md's Headline: what was run; rows of name, seconds, ratio, GPU GiB."""
    section = _section("Headline")
    rows = re.findall(
        r"^\| \**([^|]+?)\** \| \**([\d.]+) s\** \| ([\d.]+) \| ([\d.]+ GiB)",
        section,
        flags=re.MULTILINE,
    )
    what = section.split("**")[1]
    return " ".join(what.split()), [(row[0], float(row[1]), row[2], row[3]) for row in rows]


def _bars(name: str, what: str, rows: list[tuple[str, float, str]], *, dark: bool) -> None:
    """Draws a bar per row, below its name and words, legible on a phone; hytrain's are green."""
    ink, pale, ground = ("#e6edf3", "#9198a1", "#0d1117") if dark else (INK, PALE, "#ffffff")
    longest = max(length for _, length, _ in rows)
    picture = Picture(520, 50 * len(rows) + 40, ground)
    for number, (system, length, words) in enumerate(rows):
        y = 8 + 50 * number
        is_limit = system.startswith("forward")
        fill = "#8c959f" if is_limit else BACK if "hytrain" in system else FORWARD
        picture.words(12, y + 17, f"{system}: {words}", ink=ink, size=14)
        picture.box(12, y + 24, 496 * length / longest, 16, fill, edge=ground)
    picture.words(12, 50 * len(rows) + 28, what, ink=pale)
    picture.write(f"{name}_{'dark' if dark else 'light'}.svg")


def step_times(*, dark: bool) -> None:
    """Draws the headline's table; README.md and docs/index.md have the same figures."""
    what, rows = headline()
    found = [
        (name, seconds, f"{seconds:.3f} s, {note}, GPU {memory}")
        for number, (name, seconds, ratio, memory) in enumerate(rows)
        for note in ["the limit" if number == 0 else f"{ratio} x the limit"]
    ]
    _bars("step_times", what, found, dark=dark)


def in_trl(*, dark: bool) -> None:
    """Draws the 4 B row of the Trainer table."""
    row = re.search(r"^\| 4\.0 B,.*$", _section("Inside Trainer"), flags=re.MULTILINE)
    assert row is not None
    zero2, own, alone = (
        float(cell.strip("* ").replace(",", "")) for cell in row[0].split("|")[2:5]
    )
    memory = re.search(
        r"^- 4 B: .*?takes ([\d.]+) GiB.*?offload ([\d.]+) GiB.*?alone\s+([\d.]+) GiB",
        _section("Inside Trainer"),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert memory is not None
    systems = (
        ("hytrain", own, memory[1]),
        ("Trainer without DeepSpeed (fp32 weights, autocast)", alone, memory[3]),
        ("ZeRO-2 offload", zero2, memory[2]),
    )
    rows = [(name, ms, f"{ms / 1000:.3f} s, GPU {gib} GiB") for name, ms, gib in systems]
    what = "A step of a 4.0 B model in TRL's SFT, 8 x 1024 tokens, one H200"
    _bars("in_trl", what, rows, dark=dark)


def largest_model(*, dark: bool) -> None:
    """Draws the table of the largest models with fp32 moments."""
    found = re.findall(
        r"^\| ([^|]+?) \| (([\d.]+) B[^|]*?) \|",
        _section("Large models on one GPU").split("| trained |")[1],
        flags=re.MULTILINE,
    )
    rows = [(name, float(size), words) for name, words, size in found]
    what = "Largest model trained on one H200, fp32 moments, 128 GiB of host memory"
    _bars("largest_model", what, rows, dark=dark)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for chart in (step_times, in_trl, largest_model):
        chart(dark=False)
        chart(dark=True)
    preview_and_commit()
    share_on_gpu()
    layer_major()
    threads()
    life_of_a_gradient()

"""Pictures of report pages, as `docs/report.md` shows them: the first screen at 1400 and 390 pixels, light and dark.

Needs Chromium and Pillow. Make the runs first: `tiny` by `scoregram train --steps 60 --rollouts-every 5`, `trl` by the
example of `docs/trl.md`; `gsm8k` is `results/smollm2-gsm8k/runs/R8-seed0`.

    python docs/figures/report.py tiny=RUN gsm8k=RUN trl=RUN [--dark NAME] [--below] [--out FOLDER]
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from scoregram.report import write_report

SIZES = {"": (1400, 900), "-phone": (390, 1500)}
"""End of a picture's name → width and height in pixels."""
BELOW, PIECE = 8000, 1000
"""Height of a whole page, and of the pictures that it is cut into."""


def take(page: Path, out: Path, width: int, height: int, *, dark: bool = False, colours: int = 256) -> None:
    """A screenshot with few colours, which keeps the file small; `colours` 0 keeps all of them."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *scheme]
        command += [f"--user-data-dir={profile}", "--virtual-time-budget=8000", f"--window-size={width},{height}"]
        command += [f"--screenshot={out}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True)
    picture = Image.open(out).convert("RGB")
    # by coverage: the palette keeps small patches, such as the swatches of a legend, in their own colours
    (picture.quantize(colours, Image.Quantize.MAXCOVERAGE) if colours else picture).save(out, optimize=True)


def cut_page(page: Path, out: Path) -> None:
    """The part of a page below the first screen, in several pictures."""
    whole = out.with_name(f"{out.stem}-whole.png")
    take(page, whole, 1400, BELOW, colours=0)
    with Image.open(whole) as picture:
        for place, top in enumerate(range(850, BELOW - PIECE, PIECE - 50)):
            picture.crop((0, top, 1400, top + PIECE)).save(out.with_name(f"{out.stem}-below{place + 1}.png"))
    whole.unlink()


def main() -> None:
    """Write the pages of all runs and take their pictures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("runs", nargs="+", metavar="NAME=RUN")
    options.add_argument("--dark", metavar="NAME", help="take the first screen of this run in dark colours too")
    options.add_argument("--below", action="store_true", help="also take what follows the first screen")
    options.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for one in given.runs:
        name, _, folder = one.partition("=")
        with tempfile.TemporaryDirectory() as scratch:
            page = write_report(folder, Path(scratch) / "report.html")
            for end, (width, height) in SIZES.items():
                take(page, given.out / f"report-{name}{end}.png", width, height)
            if given.dark == name:
                take(page, given.out / f"report-{name}-dark.png", *SIZES[""], dark=True)
            if given.below:
                cut_page(page, given.out / f"report-{name}.png")


if __name__ == "__main__":
    main()

"""How large a report of many workers is, and how soon a browser shows it.

    python benchmarks/report_opening.py --workers 1000

Simulates four policies with so many workers, writes the report, and has headless Chromium (Debian's `chromium`) take
a picture of it a few times; prints the median time, starting the browser included, beside that of an empty page.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLICIES = ("bsp", "ssp:staleness=3", "pssp:staleness=3,c=0.3", "asp")


def seconds_to_show(browser: str, page: Path, picture: Path) -> float:
    began = time.perf_counter()
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no browser: install one with `apt-get install chromium`")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        run = ["--workers", str(options.workers), "--iterations", str(options.iterations), "--report", str(report)]
        cluster = ["--cluster", "random-slowdown:factor=6"]
        subprocess.run([sys.executable, "-m", "paceline", "compare", *POLICIES, *run, *cluster], check=True)
        blank, picture = Path(folder, "blank.html"), Path(folder, "picture.png")
        blank.write_text("<!doctype html><title>nothing</title>")
        shown = [seconds_to_show(browser, report, picture) for _ in range(options.times)]
        nothing = [seconds_to_show(browser, blank, picture) for _ in range(options.times)]
        size = report.stat().st_size / 1e6
    print(
        f"{options.workers} workers, {len(POLICIES)} policies: {size:.2f} MB; browser started to picture "
        f"{statistics.median(shown):.2f} s, of an empty page {statistics.median(nothing):.2f} s"
    )


if __name__ == "__main__":
    main()

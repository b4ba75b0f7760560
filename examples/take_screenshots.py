"""Takes docs/images/report.png and trace.png: pages that the commands write, in a headless Chromium.

Needs selenium, chromium and chromedriver. The report is that of the committed artifacts.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from selenium import webdriver

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "Tom has 12 pens. Tom buys 9 more. Ann has 3 more pens than Tom. How many pens does Ann have?"
RULES = ("window:refresh=block", "trim:level=changed", "suffix_dropout")


def stepsaver(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "stepsaver", *arguments], cwd=ROOT, check=True)


def browser(folder: Path) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def main() -> None:
    with TemporaryDirectory() as made:
        folder = Path(made)
        stepsaver("report", "02_trim", "--html", str(folder / "report.html"))
        rules = [each for rule in RULES for each in ("--rule", rule)]
        trace = ["--trace", str(folder / "trace.html"), "--trace-against", "none"]
        stepsaver("generate", "--prompt", PROMPT, *rules, *trace)
        opened = browser(folder / "profile")
        try:
            opened.set_window_size(1100, 760)
            for name in ("report", "trace"):
                opened.get((folder / f"{name}.html").as_uri())
                if name == "trace":  # a few steps on, where something has been left out
                    for _ in range(4):
                        opened.switch_to.active_element.send_keys("\ue014")  # right arrow
                opened.save_screenshot(str(ROOT / "docs" / "images" / f"{name}.png"))
        finally:
            opened.quit()


if __name__ == "__main__":
    main()

"""What the tests of pages do with a browser."""

import re
from pathlib import Path
from typing import Any


def open_page(browser: Any, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
    """Opens a page and sees that it has nothing to complain about."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    set_scheme(browser, scheme)
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []


def show(browser: Any, path: Path, **how: Any) -> None:
    """Opens a report and waits until all its figures are drawn and its samples unpacked."""
    open_page(browser, path, **how)
    browser.execute_async_script("window.shown.then(() => arguments[0]())")
    assert browser.get_log("browser") == []


def set_scheme(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def text(browser: Any, selector: str) -> str:
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def texts(browser: Any, selector: str) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
    )


def count(browser: Any, selector: str) -> int:
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def background_shades(browser: Any) -> list[int]:
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    return [int(each) for each in re.findall(r"\d+", background)]

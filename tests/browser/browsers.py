"""Windows of readers, and what axe says of a page."""

from __future__ import annotations

from typing import Any

WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def problems_of(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{each['id']} ({each['impact']}): {each['nodes'][0]['html'][:160]}" for each in found]

"""What tests look for in a page."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# The lowest contrast of any text with what lies behind it, as WCAG 2 counts it, with the text.
_CONTRAST = """
() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * x + .7152 * y + .0722 * z;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > .99) return colour;
    }
    return [255, 255, 255];
  };
  let worst = {contrast: 99, text: ""};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || element.closest("script, style, svg, option") || !element.getClientRects().length) continue;
    const pair = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    const contrast = (pair[0] + .05) / (pair[1] + .05);
    if (contrast < worst.contrast) worst = {contrast, text};
  }
  return worst;
}
"""


def draw_all(page: "Page") -> "list[Locator]":
    """Scroll through the page; return the plots that were drawn, all that can be seen."""
    drawn = []
    for place in page.locator(".plot").all():
        if place.is_visible():
            place.scroll_into_view_if_needed()
            place.locator("svg.main-svg").first.wait_for()
            drawn.append(place)
    return drawn


def lowest_contrast(page: "Page") -> dict[str, Any]:
    """Return the text that is hardest to read, and its contrast: 4.5 is enough for everybody (WCAG 2, AA)."""
    found: dict[str, Any] = page.evaluate(_CONTRAST)
    return found


def overflow_px(page: "Page") -> int:
    """Return by how much the page is wider than the screen."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def nameless(page: "Page") -> list[str]:
    """Return what a screen reader meets without a name: links, plots, fields, regions, tables' headers."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("a, [role=img], select, summary, [role=region], nav, section, th")]
        .filter((element) => {
          const by = element.getAttribute("aria-labelledby");
          const named = element.getAttribute("aria-label") || (by && document.getElementById(by)?.textContent)
            || (element.labels?.length && element.labels[0].textContent) || element.textContent;
          return !named.trim() && !(element.matches("thead th:first-child"));
        }).map((element) => element.outerHTML.slice(0, 200))"""
    )
    return found

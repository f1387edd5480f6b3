"""The report page: one self-contained HTML file of all results, with the provenance of every number."""

from kvprobe.html.page.write import Page, load_newest, write_page

__all__ = ["Page", "load_newest", "write_page"]

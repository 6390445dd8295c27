"""Reports: one HTML file that opens from a disk, with tables and plots of a trace, a compilation or a plan."""

from rooftop.present.report.page import Material, page

__all__ = ["Material", "page"]

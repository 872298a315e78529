"""Showing exhibits: tables in a terminal, figures, and one self-contained page for a run."""

from scoregram.report.folder import write_report as write_report
from scoregram.report.numbers import cell_text as cell_text
from scoregram.report.page import Section as Section
from scoregram.report.page import write_page as write_page
from scoregram.report.terminal import show_table as show_table

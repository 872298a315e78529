"""Showing exhibits: tables in a terminal, figures, and one self-contained page for a run or a replication."""

from scoregram.report.folder import write_report as write_report
from scoregram.report.page import Section as Section
from scoregram.report.page import write_page as write_page
from scoregram.report.terminal import show_table as show_table

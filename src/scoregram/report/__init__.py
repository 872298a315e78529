"""Showing results: tables in a terminal, figures, and one self-contained page for a run."""

from scoregram.report.page import Section as Section
from scoregram.report.page import write_page as write_page
from scoregram.report.replay_table import show_replay as show_replay
from scoregram.report.run_page import folder_content as folder_content
from scoregram.report.run_page import write_report as write_report
from scoregram.report.several_page import write_several_report as write_several_report
from scoregram.report.terminal import show_table as show_table
from scoregram.report.view import serve_runs as serve_runs
from scoregram.report.view import view_app as view_app

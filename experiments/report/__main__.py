"""`python -m experiments.report`: the command is in `command`."""

from experiments.report.command import main
from varjax.cli import command_line

command_line.run(main)

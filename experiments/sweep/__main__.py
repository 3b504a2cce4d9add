"""`python -m experiments.sweep`: the command is in `command`."""

from experiments.sweep.command import main
from varjax.cli import command_line

command_line.run(main)

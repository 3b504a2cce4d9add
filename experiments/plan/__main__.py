"""`python -m experiments.plan`: the command is in `command`."""

from experiments.plan.command import main
from varjax.cli import command_line

command_line.run(main)

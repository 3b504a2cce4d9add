"""Check the parts that --shard=I/N has made, and join them to what one process would have written.

    python -m experiments.run --num_images=50000 --shard=0/2 --out=OUT
    python -m experiments.run --num_images=50000 --shard=1/2 --out=OUT
    python -m experiments.merge OUT

Joins parts of experiments.run and of experiments.sweep. Neither checkpoint nor device is needed.
All parts have to be there, each once, finished, and made with the same flags, checkpoint and
versions; what is missing or damaged is named, and nothing is changed then. The results take the
place of the parts in OUT.
"""

from experiments import parts
from experiments.merge import runs, sweeps
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags
from varjax.storage.atomic import check_place

FLAGS = CommandFlags(
    "python -m experiments.run --num_images=4 --shard=0/2 --out=OUT\n"
    "python -m experiments.run --num_images=4 --shard=1/2 --out=OUT\n"
    "--out=OUT"
)
OUT = FLAGS.argument("out", "Folder of the parts, their --out.")
JOINS = {"run": runs.join, "sweep": sweeps.join}


def main(argv: list[str]) -> None:
    out = check_place(OUT.value, flag="OUT")
    found = parts.read(out)
    with parts.held(found):
        text = JOINS[found[0].content["command"]](out, found)
    print(text)


if __name__ == "__main__":
    command_line.run(main)

"""A page and an API that draw pictures, on one server.

    python -m experiments.serve
    python -m experiments.serve --policy=headkv --budget=0.1 --kv_bytes=64MiB --port=7860

The page is at http://127.0.0.1:7860/, the API under /v1: POST /v1/images/generations and
/v1/images/edits as OpenAI's clients send them, GET /v1/models; also /healthz, /metrics and /docs.
--policy and --budget are what requests get that name none; without them headkv at 0.25, or the full
cache of a model that cannot have it. SIGTERM ends the server when all that it accepted is drawn.
Anyone who reaches the address may use it: it is this machine's own unless --host says otherwise;
give --api_key then.
"""

import socket
import time
from typing import TYPE_CHECKING

import varjax
from experiments.budgets import images_at_once, parse_bytes
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags, plan_remarks
from experiments.flags.program import ProgramFlags
from experiments.flags.sampling import SamplingFlags
from experiments.output import say
from experiments.serve.subjects import subjects
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.core.sampling import Sampling
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.generation.memory import show_bytes
from varjax.models.loading import load_weights
from varjax.models.model import Model
from varjax.policies import Policy, get_policy
from varjax.storage import ordinary
from varjax.storage.values import require

if TYPE_CHECKING:
    from experiments.serve.service import Service

MOST_BATCH, MOST_QUEUE = 1024, 10**6
LONGEST_KEY = 4096  # bytes
BACKLOG = 2048  # connections that wait to be accepted
USUAL, FULL = "headkv", "full"

FLAGS = CommandFlags(
    "--policy=headkv --budget=0.25 --port=7860",
    "policy budget policies kv_bytes checkpoint host port api_key allowed_hosts queue max_batch",
    compiles=True,
)
MODEL = ModelFlags(FLAGS)
POLICY = PolicyFlags(FLAGS, sizes=False, usual=USUAL)
SAMPLING = SamplingFlags(FLAGS, seed=False)
PROGRAM = ProgramFlags(FLAGS, batches=False)
HOST = FLAGS.string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 is every one.")
PORT = FLAGS.integer("port", 7860, "Port; 0: any free one.", lower_bound=0, upper_bound=65535)
POLICIES = FLAGS.list("policies", None, "Policies that requests may name; default: all that fit.")
HOSTS = FLAGS.list("allowed_hosts", [], "Names that clients may know the server by; *: any.")
ORIGINS = FLAGS.list("cors_origin", [], "Pages of other servers that may use the API; *: any.")
QUEUE = FLAGS.integer("queue", 64, "Pictures that may wait; more are refused (429).", 1, MOST_QUEUE)
MAX_BATCH = FLAGS.integer("max_batch", 8, "Images drawn at once, at most.", 1, MOST_BATCH)
KV_BYTES = FLAGS.string(
    "kv_bytes", None, "Bytes that keys and values may take, as 2GiB: decides how many images fit."
)
API_KEY = FLAGS.string(
    "api_key",
    None,
    "File whose first line clients must send as `Authorization: Bearer KEY`; the page's password.",
)


def read_key() -> str | None:
    """The API key; None if there is none. `UserError` if the file holds none that can be sent."""
    if not API_KEY.value:
        return None
    with about(API_KEY):
        data = ordinary.read_file(API_KEY.value, LONGEST_KEY)
        lines = data.decode("ascii", "replace").splitlines()
        key = lines[0].strip() if lines else ""
        if not key or not key.isascii() or not key.isprintable():
            raise UserError("its first line must be the key, printable ASCII")
        return key


def bound_socket() -> socket.socket:
    """Return a socket that listens. `UserError` if the address is taken or is none."""
    try:
        family = socket.getaddrinfo(HOST.value, PORT.value, type=socket.SOCK_STREAM)[0][0]
        # it listens from now on: only this keeps another server from the same port. Clients that
        # come while programs are compiled wait to be accepted.
        return socket.create_server((HOST.value, PORT.value), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--host={HOST.value} --port={PORT.value}: {reason}; choose another address or port, "
            f"--port=0 takes any free one"
        ) from None


def usual_plan(model: Model, sampling: Sampling) -> tuple[Policy, CachePlan]:
    """Policy for requests that name none, and its plan. A model that cannot have the default policy
    has the full cache, unless flags say otherwise."""
    policy = POLICY.resolve()
    try:
        plan, calibration = POLICY.plan(policy, model, sampling)
    except UserError:
        if POLICY.is_chosen:
            raise
        policy = get_policy(FULL)
        plan, calibration = POLICY.plan(policy, model, sampling)
    for line in plan_remarks(plan, calibration):
        say(line)
    policy.check_images(1)
    return policy, plan


def make_service() -> "Service":
    """Check every flag, plan the cache and load the model. Compile nothing."""
    from experiments.serve.guard import Rules
    from experiments.serve.programs import Batcher, Choice, Programs
    from experiments.serve.service import Service

    key, model = read_key(), PROGRAM.stored(MODEL.resolve())
    sampling, program = SAMPLING.sampling(model), PROGRAM.resolve(model)
    policy, plan = usual_plan(model, sampling)
    usual = Choice(policy, sampling)
    with about(KV_BYTES):
        kv_bytes = None if KV_BYTES.value is None else parse_bytes(KV_BYTES.value)
        most = images_at_once(plan, program.kv_dtype, kv_bytes, MAX_BATCH.value)
    size = show_bytes(plan.num_bytes(1, program.kv_dtype))
    at_once = f"{size} of keys and values for an image, {most} images at once"
    say(f"{usual.policy.name}, budget {plan.budget:g}: {at_once}")
    model = load_weights(model, program.dtype)

    def make(plan: CachePlan, sampling: Sampling, size: int, build: Build) -> Generator:
        given = {"plan": plan, "sampling": sampling, "batch_size": size}
        return Generator(model, **given, kv_dtype=program.kv_dtype, build=build)

    def plan_of(choice: Choice) -> CachePlan:
        if choice == usual:
            return plan
        choice.policy.check_images(1)
        return varjax.plan(model, choice.policy, sampling=choice.sampling)

    programs = Programs(model, usual, make=make, plan_of=plan_of, most=most, build=program.build)
    with about(POLICIES):
        return Service(
            model=model,
            subjects=subjects(model),
            batcher=Batcher(programs, QUEUE.value),
            rules=Rules(
                host=HOST.value.lower(),
                hosts=tuple(name.lower() for name in HOSTS.value),
                origins=tuple(ORIGINS.value),
                key=key,
            ),
            policies=POLICIES.value,
        )


def main(argv: list[str]) -> None:
    for module in ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "PIL.Image"):
        require(module, extra="serve", purpose="a server")
    from experiments.serve import server as http
    from experiments.serve.api import make_app

    with bound_socket() as listening:
        service = make_service()
        start = time.perf_counter()
        service.programs.compile()
        say(f"compiled in {time.perf_counter() - start:.1f} s; larger batches follow")
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        http.Connection.fit_descriptors()
        server = http.Server(make_app(service), lambda: say(f"ready at {address}"))
        server.run(sockets=[listening])
    http.leave()


if __name__ == "__main__":
    command_line.run(main)

"""Names of what training scripts leave beside weights. Such objects are passed over, never made.

An object of a class that is not listed here is refused, with its name: a note that nobody knows may
be what somebody hides.
"""

import re

# Types, functions that make their objects (as pickles of any protocol call them), and whole
# packages of trainers and of their configurations.
NOTES = re.compile(
    r"""
    argparse\.Namespace | types\.SimpleNamespace | collections\.(defaultdict | deque | Counter)
    | (__builtin__ | builtins)\.(bool | bytearray | bytes | complex | dict | Ellipsis | float
        | frozenset | int | list | long | object | range | set | slice | str | tuple | type
        | unicode | xrange)
    | (copy_reg | copyreg)\.(_reconstructor | __newobj_ex__) | _codecs\.encode
    | pathlib\.(_local\.)?(Pure)?(Posix | Windows)?Path
    | datetime\.(date | datetime | time | timedelta | timezone)
    | decimal\.Decimal | fractions\.Fraction | uuid\.(UUID | SafeUUID)
    | typing\.\w+ | _operator\.getitem  # omegaconf's types: Dict[str, Any] is an item of Dict
    | numpy\.(ndarray | dtype | dtypes\.\w+ | random\.\w+\.\w+ | ma\.(core\.)?\w+
        | _?core\.multiarray\.(scalar | _reconstruct) | _?core\.numeric\._frombuffer
        | (bool | bytes | object | str | void)_? | (u?int | float | complex)\d* | u?intc | u?intp
        | u?longlong | longdouble | clongdouble | datetime64 | timedelta64)
    | torch\.(device | torch_version\.TorchVersion | serialization\._get_layout
        | distributed\.fsdp\..+)
    | (accelerate | addict | deepspeed | easydict | lightning | lightning_fabric | ml_collections
        | mmengine | munch | omegaconf | pytorch_lightning | torchmetrics | transformers
        | yacs)\..+
    """,
    re.ASCII | re.VERBOSE,
)

"""What a job asks for, in the forms people write, as Slurm's options. Pure functions; every one that fails says why.

`where` names what a value was given to, for messages: `--time`, or a key of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from codegen.slurm import TWINS
from codegen.spec import WARN_SIGNAL, SpecError
from codegen.yamlfile import YamlMapping

MOST_GPUS = 9999
GPU_FORMS = "gpu, 2, h100, h100:2 or gpu:a100:4"
GPU_COUNT = re.compile(r"-?[0-9]{1,4}")
GPU_TYPE = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9_.+-]*")
NO_GPUS = ("cpu", "cpus", "none")
MIG_SLICE = re.compile(r"[0-9]+g")  # the 1g of a100_1g.5gb: a part of a GPU is no answer to a wish for a whole one

UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
LONGEST_S = 3650 * 86400
LONGEST_TEXT = 40
DURATION_FORMS = "90s, 30m, 4h, 1d, 1h30m, 02:00:00 or 1-02:00:00"
# https://slurm.schedmd.com/sbatch.html#OPT_time; its "minutes" and "minutes:seconds" are refused: people mean others
DURATIONS = (  # each has the groups days, hours, minutes, seconds
    re.compile("".join(f"(?:([0-9]+){unit})?" for unit, _ in UNITS)),
    re.compile(r"([0-9]+)-([0-9]{1,2})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?"),
    re.compile(r"()([0-9]+):([0-9]{1,2}):([0-9]{1,2})"),
)
SHORT_CLOCK = re.compile(r"([0-9]+):([0-9]{1,2})")

TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@/+-]*")
TOKEN_SIGNS = "_ . , @ / + -"
CONSTRAINT = re.compile(r"[A-Za-z0-9(\[][A-Za-z0-9_.,@/+&|()\[\]*:-]*")

SBATCH_ARG = re.compile(r"--([a-z][a-z0-9_-]*)(?:=(.+))?")
SBATCH_FORMS = "sbatch's long options with their values, such as --mem-per-cpu=4G"
OWN = "gangrun sets it itself"
NOTHING = "sbatch would submit nothing"
REFUSED_ARGS: Mapping[str, str] = {
    **dict.fromkeys(("output", "error", "open-mode", "job-name", "nodes", "ntasks", "tasks-per-node"), OWN),
    **dict.fromkeys(("parsable", "wrap"), OWN),
    **dict.fromkeys(("test-only", "help", "usage", "version"), NOTHING),
    **{name: f"use {name} (--{name}, or {name}: in a file)" for name in ("time", "partition", "account", "qos")},
    "constraint": "use constraint (--constraint, or constraint: in a file)",
    "signal": "use warn_signal, such as USR1@120",
    "requeue": "use requeue: true",
    "no-requeue": "use requeue: false",
    "array": "arrays are not supported; launch a run for each",
    "wait": "sbatch would not answer before the job's end; use `gangrun wait`",
}
EXCLUSIVE = (TWINS["cpus"], TWINS["memory_gb"])  # two of them: "fatal: ... are mutually exclusive"
TWIN_NAMES = frozenset(option[2:] for options in TWINS.values() for option in options)


# --- GPUs


@dataclass(frozen=True)
class Gpus:
    """GPUs on each node; `kind` None takes any."""

    kind: str | None
    count: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}" if self.kind else str(self.count)


def parse_gpus(text: object, where: str) -> Gpus:
    """`gpu`, `2`, `h100`, `h100:2`, `gpu:4`, `gpu:a100:4`. Raises SpecError for everything else, no GPUs included."""
    parts = str(text).split(":") if isinstance(text, (str, int)) and not isinstance(text, bool) else []
    if parts and parts[0].lower() in NO_GPUS:
        _refuse(where, text, "leave it out for a job without GPUs")
    if parts and parts[0].lower() == "gpu":
        parts = parts[1:] or ["1"]
    count = int(parts.pop()) if parts and GPU_COUNT.fullmatch(parts[-1]) else None
    if count is not None and count <= 0:
        _refuse(where, text, "leave it out for a job without GPUs")
    if len(parts) > 1 or not (parts or count) or not all(_is_gpu_type(part) for part in parts):
        _refuse(where, text, f"use {GPU_FORMS}, with 1 to {MOST_GPUS} GPUs per node")
    return Gpus(parts[0] if parts else None, count or 1)


def gres_option(gpus: Gpus, offered: Sequence[str]) -> str:
    """sbatch's --gres, with the type as the cluster spells it. Raises SpecError for a type the cluster does not have.

    `offered` is what `sinfo -h -o %G` prints, a line each; nothing means that it is not known.
    """
    if not offered:
        return f"--gres=gpu:{gpus}"
    counts = _offered_gpus(offered)
    if not counts:
        _refuse("gpus", str(gpus), "the cluster has no GPUs, says sinfo; leave it out, or see that Slurm knows them")
    kind = _offered_kind(gpus, counts) if gpus.kind else None
    return f"--gres=gpu:{Gpus(kind, gpus.count)}"


def _is_gpu_type(text: str) -> bool:
    return GPU_TYPE.fullmatch(text) is not None and text.lower() not in (*NO_GPUS, "gpu")


def _offered_gpus(offered: Sequence[str]) -> dict[str, set[str]]:
    """Types and their counts per node: {"h100": {"8"}}. GPUs without a type stand under ""."""
    counts: dict[str, set[str]] = {}
    for entry in ",".join(re.sub(r"\([^)]*\)", "", line) for line in offered).split(","):
        name, *fields = entry.strip().split(":")
        rest = [word for word in fields if word != "no_consume"]
        if name == "gpu":
            count = rest.pop() if rest and rest[-1].isdecimal() else "1"
            counts.setdefault(rest[0] if rest else "", set()).add(count)
    return counts


def _offered_kind(gpus: Gpus, counts: Mapping[str, set[str]]) -> str:
    kinds = [kind for kind in counts if kind]
    if not kinds:
        remedy = f"ask for {gpus.count}, and choose the nodes with a partition or a constraint"
        _refuse("gpus", str(gpus), f"the cluster's GPUs have no type; {remedy}")
    for is_meant in (_is_same, _is_same_but_case, _is_same_but_signs, _is_short_for):
        meant = [kind for kind in kinds if is_meant(gpus.kind or "", kind)]
        if len(meant) == 1:
            return meant[0]
        if meant:
            _refuse("gpus", str(gpus), f"this can mean {_kinds(meant, counts)}; write one of them")
    _refuse("gpus", str(gpus), f"the cluster has {_kinds(list(counts), counts)}; write one of them")


def _kinds(kinds: Sequence[str], counts: Mapping[str, set[str]]) -> str:
    shown = ((kind or "GPUs without a type", sorted(counts[kind], key=int)) for kind in sorted(kinds))
    return ", ".join("{} ({} per node)".format(kind, " or ".join(numbers)) for kind, numbers in shown)


def _is_same(wanted: str, offered: str) -> bool:
    return wanted == offered


def _is_same_but_case(wanted: str, offered: str) -> bool:
    return wanted.lower() == offered.lower()


def _is_same_but_signs(wanted: str, offered: str) -> bool:
    return "".join(_parts(wanted)) == "".join(_parts(offered))


def _is_short_for(wanted: str, offered: str) -> bool:
    """A100-80GB for nvidia_a100-sxm4-80gb: its parts stand there, in this order; never a slice for a whole GPU."""
    slices = [part for part in _parts(offered) if MIG_SLICE.fullmatch(part)]
    return all(part in _parts(wanted) for part in slices) and _spells("".join(_parts(wanted)), _parts(offered))


def _parts(kind: str) -> list[str]:
    parts = re.findall(r"[a-z0-9]+", kind.lower())
    return parts[1:] if parts[:1] == ["nvidia"] and parts[1:] else parts


def _spells(text: str, parts: Sequence[str]) -> bool:
    """Whether some of the parts, in their order, make this text."""
    if not text:
        return True
    return any(text.startswith(part) and _spells(text[len(part) :], parts[i + 1 :]) for i, part in enumerate(parts))


# --- times


def parse_duration(text: object, where: str) -> int:
    """Seconds. Raises SpecError for what is none, or more than ten years; a number needs its unit."""
    if isinstance(text, bool) or not isinstance(text, (str, int)) or len(str(text)) > LONGEST_TEXT:
        _refuse(where, text, f"use {DURATION_FORMS}")
    if re.fullmatch("[0-9]+", str(text)):
        _refuse(where, text, f"a number has no unit; use {text}s or {text}m{_unquoted(text)}")
    match = next((match for match in (form.fullmatch(str(text)) for form in DURATIONS) if match), None)
    if match is None or not text:
        short = SHORT_CLOCK.fullmatch(str(text))
        _refuse(where, text, _two_readings(short) if short else f"use {DURATION_FORMS}")
    seconds = sum(int(count or 0) * size for count, (_, size) in zip(match.groups(), UNITS))
    return _in_range(seconds, text, where)


def checked_seconds(value: object, where: str) -> int:
    """A duration as a program gives it: a number of seconds, or a text as people write it. Raises SpecError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _in_range(value, value, where)
    return parse_duration(value, where)


def slurm_time(seconds: int) -> str:
    """`04:00:00`, `1-02:00:00`. Slurm rounds it up to minutes."""
    days, rest = divmod(seconds, 86400)
    clock = "%02d:%02d:%02d" % (rest // 3600, rest // 60 % 60, rest % 60)
    return f"{days}-{clock}" if days else clock


def words(seconds: float) -> str:
    """For people: `4h`, `1d 2h`, `1m 30s`. The two largest units; what is smaller is left off."""
    rest = max(0, int(seconds))
    largest = next((index for index, (_, size) in enumerate(UNITS) if rest >= size), len(UNITS) - 1)
    shown = []
    for unit, size in UNITS[largest : largest + 2]:
        count, rest = divmod(rest, size)
        shown += [f"{count}{unit}"] if count else []
    return " ".join(shown) or "0s"


def _in_range(seconds: int, text: object, where: str) -> int:
    if not 0 < seconds <= LONGEST_S:
        _refuse(where, text, "use a time of 1s to 3650d")
    return seconds


def _two_readings(short: re.Match[str]) -> str:
    large, small = (int(number) for number in short.groups())
    return f"this can mean {large}h{small}m or {large}m{small}s; write one of them"


def _unquoted(number: object) -> str:
    """YAML 1.1 reads 12:00:00 as a number to the base of 60."""
    if not isinstance(number, int) or number < 3600:
        return ""
    clock = "%d:%02d:%02d" % (number // 3600, number // 60 % 60, number % 60)
    return f" (for {clock} write '{clock}': YAML takes it for this number)"


# --- names and options


def checked_token(value: object, where: str) -> str:
    """The name of a partition, an account or a qos, or several with commas. Raises SpecError."""
    return _matching(TOKEN, value, where, f"letters, digits and {TOKEN_SIGNS}, with a letter or a digit first")


def checked_constraint(value: object, where: str) -> str:
    """What sbatch's --constraint takes: `h100`, `h100&ib`, `[rack1|rack2]`. Raises SpecError."""
    signs = "& | ( ) [ ] * :"
    return _matching(CONSTRAINT, value, where, f"letters, digits, {TOKEN_SIGNS} and {signs}, as in h100&ib")


def checked_signal(value: object, where: str) -> str:
    """`USR1@120`. Raises SpecError."""
    return _matching(WARN_SIGNAL, value, where, "USR1@120 or USR2@120")


def checked_switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        _refuse(where, value, "use true or false")
    return value


def checked_sbatch_args(value: object, where: str) -> tuple[str, ...]:
    """Further options for sbatch. Raises SpecError for what is no option and for those that gangrun answers for."""
    if not isinstance(value, (list, tuple)):
        _refuse(where, value, "use a list of sbatch's long options, such as [--mem-per-cpu=4G]")
    return tuple(_sbatch_arg(argument, where) for argument in value)


def joined(*levels: Sequence[str]) -> tuple[str, ...]:
    """Checked sbatch arguments, the level with the most to say last. Without what sbatch would refuse beside it."""
    result: list[str] = []
    for level in levels:
        replaced = [names for names in EXCLUSIVE if names_option(level, *names)]
        result = [argument for argument in result if not any(names_option([argument], *names) for names in replaced)]
        result += level
    return tuple(result)


def names_option(args: Sequence[str], *names: str) -> bool:
    """Whether one of these options, `--mem` or `-c`, stands among checked sbatch arguments."""
    return named_option(args, *names) is not None


def named_option(args: Sequence[str], *names: str) -> str | None:
    """The last of the arguments that is one of these options: the one sbatch goes by."""
    return next((argument for argument in reversed(args) if _is_one_of(argument, names)), None)


def _is_one_of(argument: str, names: Sequence[str]) -> bool:
    short = [name for name in names if len(name) == 2]
    return argument.partition("=")[0] in names or argument.startswith(tuple(short))


def _sbatch_arg(argument: object, where: str) -> str:
    match = SBATCH_ARG.fullmatch(argument) if isinstance(argument, str) and argument.isprintable() else None
    if match is None:
        _refuse(where, argument, f"use {SBATCH_FORMS}")
    name, value = match.groups()
    reason = REFUSED_ARGS.get("ntasks" if name.startswith("ntasks") else name)
    if reason is not None:
        _refuse(where, argument, f"not allowed here: {reason}")
    if name in TWIN_NAMES and value is None:
        _refuse(where, argument, f"it needs its value: --{name}=VALUE")
    full = [known for known in (*REFUSED_ARGS, *sorted(TWIN_NAMES)) if known.startswith(name)]
    if full and name not in TWIN_NAMES:  # sbatch takes any beginning that only one option has
        _refuse(where, argument, f"write the option in full: --{full[0]}")
    return match.group()


def _matching(form: re.Pattern[str], value: object, where: str, allowed: str) -> str:
    if not isinstance(value, str):
        _refuse(where, value, f"use a text, in quotes where YAML takes it for something else: {allowed}")
    if form.fullmatch(value) is None:
        _refuse(where, value, f"use {allowed}")
    return value


def _refuse(where: str, value: object, message: str) -> NoReturn:
    raise SpecError(f"{where}={value!r}: {message}")


# --- what a task file, the settings and the command line have in common

CHECKS: Mapping[str, Callable[[object, str], Any]] = {
    "time": parse_duration,
    "partition": checked_token,
    "account": checked_token,
    "qos": checked_token,
    "constraint": checked_constraint,
    "sbatch_args": checked_sbatch_args,
    "requeue": checked_switch,
    "warn_signal": checked_signal,
    "grace": parse_duration,
}


def checked_values(mapping: YamlMapping, checks: Mapping[str, Callable[[object, str], Any]]) -> dict[str, Any]:
    """Those of a file's values that have a check and are not null. Wrong ones raise SpecError with file and line."""
    keys = [key for key in checks if mapping.values.get(key) is not None]
    return {key: _checked(mapping, key, checks[key]) for key in keys}


def _checked(mapping: YamlMapping, key: str, check: Callable[[object, str], Any]) -> Any:
    try:
        return check(mapping.values[key], key)
    except SpecError as error:
        mapping.fail(key, str(error))

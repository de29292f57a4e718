"""GPU requests, times and sbatch options in the forms people write, as Slurm takes them."""

from __future__ import annotations

import pytest

from codegen import SpecError
from gangrun import requests
from gangrun.requests import Gpus, gres_option, parse_duration, parse_gpus, slurm_time, words

CONTROL = ("a\nb", "a\rb", "a\tb", "a\0b", "a\x1b[1m", "a\u2028b")
HOUR, DAY = 3600, 86400


def complaint(check: object, value: object, where: str = "--x") -> str:
    """What is said about a value, after its name and itself: one line."""
    with pytest.raises(SpecError) as error:
        check(value, where)  # type: ignore[operator]
    said, start = str(error.value), f"{where}={value!r}: "
    assert said.startswith(start) and "\n" not in said and error.value.exit_code == 2
    return said[len(start) :]


# --- GPU requests


@pytest.mark.parametrize(
    "text, kind, count",
    [
        ("gpu", None, 1),
        ("GPU", None, 1),
        ("2", None, 2),
        (2, None, 2),
        ("gpu:4", None, 4),
        ("h100", "h100", 1),
        ("h100:2", "h100", 2),
        ("A100:8", "A100", 8),
        ("gpu:a100", "a100", 1),
        ("gpu:a100:4", "a100", 4),
        ("A100-80GB:2", "A100-80GB", 2),
        ("nvidia_a100-sxm4-80gb", "nvidia_a100-sxm4-80gb", 1),
        ("2080ti:1", "2080ti", 1),
        ("a100_1g.5gb:1", "a100_1g.5gb", 1),
        ("9999", None, 9999),
    ],
)
def test_gpus_are_asked_for_in_the_forms_people_write(text: object, kind: str | None, count: int) -> None:
    assert parse_gpus(text, "--gpus") == Gpus(kind, count)


@pytest.mark.parametrize(
    "text", ["0", 0, "-1", "-0", "gpu:0", "h100:0", "h100:-2", "gpu:a100:00", "cpu", "CPU", "cpu:2", "Cpus:4", "none"]
)
def test_a_job_without_gpus_is_told_to_leave_the_request_out(text: object) -> None:
    assert complaint(parse_gpus, text) == "leave it out for a job without GPUs"


JUNK_GPUS = ["", ":", "gpu:", ":2", "h100:", "h100:2:3", "2:h100", "gpu:gpu:2", "gpu:cpu:2", "gpu:a:b:2", "a b", " 2"]
JUNK_GPUS += ["h100:2 ", "h100,a100", "-h100", "--gres", "h100:two", "h100:1.5", "1.5", "10000", "h100:99999", "²", "é"]
JUNK_GPUS += ["h100:2\n", "$(id)", "gres/gpu:2"]


@pytest.mark.parametrize("text", [*JUNK_GPUS, *CONTROL, None, True, 1.5, ["h100"]])
def test_what_is_no_gpu_request_is_refused_with_the_forms(text: object) -> None:
    forms = "use gpu, 2, h100, h100:2 or gpu:a100:4, with 1 to 9999 GPUs per node"
    assert complaint(parse_gpus, text, "--gpus") == forms


LINES = ("gpu:h100:8(S:0-1),gpu:a100:4(S:0,1)", "gpu:a100:2", "(null)", "gpu:a100:16,tmpfs:no_consume:100")


@pytest.mark.parametrize(
    "text, offered, option",
    [
        ("gpu", (), "--gres=gpu:1"),
        ("H100:2", (), "--gres=gpu:H100:2"),
        ("2", LINES, "--gres=gpu:2"),
        ("2", ("gpu:2",), "--gres=gpu:2"),
        ("2", ("gpu",), "--gres=gpu:2"),
        ("h100:2", LINES, "--gres=gpu:h100:2"),
        ("H100:2", LINES, "--gres=gpu:h100:2"),
        ("a100", ("gpu:A100:4",), "--gres=gpu:A100:1"),
        ("A100", ("gpu:a100:4,gpu:A100:2",), "--gres=gpu:A100:1"),
        ("A100-80GB:4", ("gpu:a100_80gb:4", "gpu:a100_40gb:4"), "--gres=gpu:a100_80gb:4"),
        ("A100-80GB", ("gpu:nvidia_a100-sxm4-80gb:4", "gpu:nvidia_a100-sxm4-40gb:4"), "nvidia_a100-sxm4-80gb:1"),
        ("A100-80GB", ("gpu:a100:4", "gpu:nvidia_a100_80gb:4"), "--gres=gpu:nvidia_a100_80gb:1"),
        ("nvidia_h100", ("gpu:h100:8",), "--gres=gpu:h100:1"),
        ("h100", ("gpu:nvidia_h100_80gb_hbm3:8",), "--gres=gpu:nvidia_h100_80gb_hbm3:1"),
        ("RTX3090", ("gpu:nvidia_geforce_rtx_3090:2",), "--gres=gpu:nvidia_geforce_rtx_3090:1"),
        ("a100", ("gpu:a100:4", "gpu:a100_80gb:4"), "--gres=gpu:a100:1"),
        ("a100_1g.5gb", ("gpu:a100_1g.5gb:7",), "--gres=gpu:a100_1g.5gb:1"),
        ("A100", ("gpu:a100:no_consume:4",), "--gres=gpu:a100:1"),
    ],
)
def test_a_gpu_type_is_spelled_as_the_cluster_spells_it(text: str, offered: tuple[str, ...], option: str) -> None:
    found = gres_option(parse_gpus(text, "--gpus"), offered)
    assert found == option if option.startswith("--") else found == "--gres=gpu:" + option


HAS = "the cluster has a100 (2 or 4 or 16 per node), h100 (8 per node); write one of them"


@pytest.mark.parametrize(
    "text, offered, said",
    [
        ("v100:2", LINES, "gpus='v100:2': " + HAS),
        ("h10", LINES, "gpus='h10:1': " + HAS),
        ("A100-80GB", LINES, "gpus='A100-80GB:1': " + HAS),
        ("nvidia", LINES, "gpus='nvidia:1': " + HAS),
        ("L4", ("gpu:l40:2",), "gpus='L4:1': the cluster has l40 (2 per node); write one of them"),
        (
            "v100",
            ("gpu:h100:8", "gpu:4"),
            "gpus='v100:1': the cluster has GPUs without a type (4 per node), h100 (8 per node); write one of them",
        ),
        (
            "a100",
            ("gpu:a100_40gb:4", "gpu:a100_80gb:8"),
            "gpus='a100:1': this can mean a100_40gb (4 per node), a100_80gb (8 per node); write one of them",
        ),
        (
            "a100",
            ("gpu:a100_1g.5gb:7",),
            "gpus='a100:1': the cluster has a100_1g.5gb (7 per node); write one of them",
        ),
        (
            "h100:2",
            ("gpu:4", "(null)"),
            "gpus='h100:2': the cluster's GPUs have no type; "
            "ask for 2, and choose the nodes with a partition or a constraint",
        ),
        (
            "2",
            ("(null)", "tmpfs:100"),
            "gpus='2': the cluster has no GPUs, says sinfo; leave it out, or see that Slurm knows them",
        ),
    ],
)
def test_a_type_that_is_not_there_is_told_with_those_that_are(text: str, offered: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError) as error:
        gres_option(parse_gpus(text, "--gpus"), offered)
    assert str(error.value) == said


# --- times


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90s", 90),
        ("30m", 1800),
        ("4h", 4 * HOUR),
        ("1d", DAY),
        ("1h30m", 5400),
        ("1d2h3m4s", DAY + 2 * HOUR + 184),
        ("1d5s", DAY + 5),
        ("1-02:00:00", DAY + 2 * HOUR),
        ("1-02:30", DAY + 2 * HOUR + 1800),
        ("1-02", DAY + 2 * HOUR),
        ("02:00:00", 2 * HOUR),
        ("100:00:00", 100 * HOUR),
        ("00:90:00", 5400),
        ("00:00:01", 1),
        ("3650d", 3650 * DAY),
    ],
)
def test_a_time_is_read_as_people_mean_it(text: str, seconds: int) -> None:
    assert parse_duration(text, "--time") == seconds


@pytest.mark.parametrize("text", ["90", 90, "0", "00015"])
def test_a_number_without_a_unit_is_no_time(text: object) -> None:
    assert complaint(parse_duration, text) == f"a number has no unit; use {text}s or {text}m"


def test_a_clock_that_yaml_took_for_a_number_is_recognised() -> None:
    said = complaint(parse_duration, 43200, "time")
    assert said.endswith("43200m (for 12:00:00 write '12:00:00': YAML takes it for this number)")


def test_a_clock_of_two_numbers_is_no_time() -> None:
    assert complaint(parse_duration, "02:30") == "this can mean 2h30m or 2m30s; write one of them"


@pytest.mark.parametrize("text", ["0s", "0d0h", "00:00:00", "0-00:00:00", "3651d", "3650d1s", "9" * 30 + "d"])
def test_no_time_at_all_and_more_than_ten_years_are_refused(text: str) -> None:
    assert complaint(parse_duration, text) == "use a time of 1s to 3650d"


JUNK_TIMES = [
    "",
    " ",
    "h",
    "4 h",
    " 4h",
    "4h ",
    "4h\n",
    "-4h",
    "-5",
    "+4h",
    "1.5h",
    "4H",
    "30m1h",
    "1h1h",
    "1w",
    "4hours",
]
JUNK_TIMES += [
    "1-",
    "1-2-3",
    "1:2:3:4",
    "1:002:3",
    "::",
    "1d-02:00:00",
    "infinite",
    "UNLIMITED",
    "٣h",
    "4h; id",
    "9" * 50,
]


@pytest.mark.parametrize("text", [*JUNK_TIMES, *CONTROL, None, True, 1.5, -5, ["4h"]])
def test_what_is_no_time_is_refused_with_the_forms(text: object) -> None:
    forms = "use 90s, 30m, 4h, 1d, 1h30m, 02:00:00 or 1-02:00:00"
    assert complaint(parse_duration, text, "--time") == forms


@pytest.mark.parametrize(
    "seconds, text",
    [(DAY + 2 * HOUR, "1-02:00:00"), (4 * HOUR, "04:00:00"), (90, "00:01:30"), (1, "00:00:01"), (DAY, "1-00:00:00")],
)
def test_a_time_is_given_to_slurm_in_its_own_format(seconds: int, text: str) -> None:
    assert slurm_time(seconds) == text


@pytest.mark.parametrize("seconds", [1, 59, 60, 61, 3599, 3600, 86399, 86400, 86401, 90061, 7 * DAY + 1, 3650 * DAY])
def test_what_is_given_to_slurm_reads_back_as_the_same_time(seconds: int) -> None:
    assert parse_duration(slurm_time(seconds), "--time") == seconds


@pytest.mark.parametrize(
    "seconds, text",
    [
        (4 * HOUR, "4h"),
        (DAY + 2 * HOUR, "1d 2h"),
        (90, "1m 30s"),
        (90.9, "1m 30s"),
        (0, "0s"),
        (0.4, "0s"),
        (-3, "0s"),
        (59, "59s"),
        (HOUR + 5, "1h"),
        (400 * DAY + 59, "400d"),
        (DAY - 1, "23h 59m"),
    ],
)
def test_a_time_is_told_to_people_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert words(seconds) == text


def test_a_program_gives_seconds_or_text() -> None:
    assert requests.checked_seconds(90, "time") == 90 and requests.checked_seconds("4h", "time") == 4 * HOUR
    assert complaint(requests.checked_seconds, 0) == "use a time of 1s to 3650d"
    assert complaint(requests.checked_seconds, "90").startswith("a number has no unit")


# --- names


@pytest.mark.parametrize("value", ["gpu", "a,b", "team@site", "proj-1/sub", "9nodes", "v1.2+x", "A_b"])
def test_the_names_that_sites_give_are_taken(value: str) -> None:
    assert requests.checked_token(value, "--partition") == requests.checked_constraint(value, "x") == value


BAD_NAMES = ["", " ", "-p", "--wrap=id", "a b", "a;id", "$(id)", "a'b", 'a"b', "a=b", ",a", "é", "a\n"]


@pytest.mark.parametrize("value", [*BAD_NAMES, *CONTROL])
def test_a_name_that_sbatch_could_take_for_more_is_refused(value: str) -> None:
    allowed = "use letters, digits and _ . , @ / + -, with a letter or a digit first"
    assert complaint(requests.checked_token, value, "--partition") == allowed
    assert complaint(requests.checked_constraint, value).endswith("as in h100&ib")


@pytest.mark.parametrize("value", [83, True, None, 1.5, ["a"]])
def test_a_name_that_yaml_took_for_something_else_is_no_name(value: object) -> None:
    assert complaint(requests.checked_token, value).startswith("use a text, in quotes where YAML takes it")


@pytest.mark.parametrize("value", ["h100&ib", "[rack1|rack2]", "[(rack1|rack2)*1&(rack3)*2]", "(a|b)&c", "x*4", "a:b"])
def test_a_constraint_may_use_slurms_operators_and_a_name_may_not(value: str) -> None:
    assert requests.checked_constraint(value, "--constraint") == value
    complaint(requests.checked_token, value)


@pytest.mark.parametrize("value", ["*a", "&a", ":a", "-a", "a&&b c"])
def test_a_constraint_starts_with_a_feature_or_a_bracket(value: str) -> None:
    complaint(requests.checked_constraint, value)


@pytest.mark.parametrize("value", ["USR1@0", "TERM@60", "USR1", "B:USR1@60", "USR1@60\n", 60])
def test_the_warning_is_usr1_or_usr2_some_seconds_before(value: object) -> None:
    assert requests.checked_signal("USR2@60", "x") == "USR2@60"
    assert complaint(requests.checked_signal, value).endswith("USR1@120 or USR2@120")


# --- sbatch's own options


def said_of(argument: object) -> str:
    """What is said about one sbatch argument."""
    with pytest.raises(SpecError) as error:
        requests.checked_sbatch_args([argument], "--sbatch-arg")
    start = f"--sbatch-arg={argument!r}: "
    assert str(error.value).startswith(start) and "\n" not in str(error.value)
    return str(error.value)[len(start) :]


def test_options_that_are_the_users_own_are_taken_as_they_stand() -> None:
    given = ["--mem-per-cpu=4G", "--exclusive", "--comment=a 'b' $c", "--gres=gpu:h100:2", "--gpus-per-node=2"]
    given += [
        "--cpus-per-task=4",
        "--exclude=n[1-3]",
        "--nodelist=n1,n2",
        "--time-min=10",
        "--mem=0",
        "--wait-all-nodes=1",
    ]
    assert requests.checked_sbatch_args(given, "x") == tuple(given)


@pytest.mark.parametrize(
    "argument, said",
    [
        ("--output=x", "gangrun sets it itself"),
        ("--error=x", "gangrun sets it itself"),
        ("--job-name=x", "gangrun sets it itself"),
        ("--nodes=2", "gangrun sets it itself"),
        ("--ntasks=2", "gangrun sets it itself"),
        ("--ntasks-per-node=2", "gangrun sets it itself"),
        ("--ntasks-per-gpu=2", "gangrun sets it itself"),
        ("--tasks-per-node=2", "gangrun sets it itself"),
        ("--open-mode=truncate", "gangrun sets it itself"),
        ("--parsable", "gangrun sets it itself"),
        ("--wrap=id", "gangrun sets it itself"),
        ("--array=1-4", "arrays are not supported; launch a run for each"),
        ("--requeue", "use requeue: true"),
        ("--no-requeue", "use requeue: false"),
        ("--signal=USR1", "use warn_signal, such as USR1@120"),
        ("--time=4", "use time (--time, or time: in a file)"),
        ("--partition=x", "use partition (--partition, or partition: in a file)"),
        ("--account=x", "use account (--account, or account: in a file)"),
        ("--qos=x", "use qos (--qos, or qos: in a file)"),
        ("--constraint=x", "use constraint (--constraint, or constraint: in a file)"),
        ("--wait", "sbatch would not answer before the job's end; use `gangrun wait`"),
        ("--test-only", "sbatch would submit nothing"),
        ("--help", "sbatch would submit nothing"),
    ],
)
def test_options_that_gangrun_answers_for_are_refused_with_the_way_to_say_it(argument: str, said: str) -> None:
    assert said_of(argument) == "not allowed here: " + said


@pytest.mark.parametrize(
    "argument, full",
    [("--outp=x", "output"), ("--arr=1", "array"), ("--mem-per-c=4", "mem-per-cpu"), ("--gre=x", "gres")],
)
def test_an_option_cut_short_is_refused_because_sbatch_would_take_it(argument: str, full: str) -> None:
    assert said_of(argument) == "write the option in full: --" + full


BAD_ARGS = ["-o", "-p gpu", "4G", "", "--", "--=x", "---x", "--Mem=4", "--mem 4G", "--mem-per-cpu 4G", "--mem=", ":", 4]


@pytest.mark.parametrize("argument", [*BAD_ARGS, None, ["--x"], "--comment=a\nb", "--comment=a\0", "--x=\x1b[1m"])
def test_what_is_no_long_option_is_refused(argument: object) -> None:
    assert said_of(argument) == "use sbatch's long options with their values, such as --mem-per-cpu=4G"


@pytest.mark.parametrize("name", ["--mem", "--gres", "--gpus", "--cpus-per-task", "--mem-per-gpu"])
def test_an_option_without_its_value_would_swallow_the_next_one(name: str) -> None:
    assert said_of(name) == f"it needs its value: {name}=VALUE"


@pytest.mark.parametrize("value", ["--exclusive", {"--mem": "4G"}, 4, True])
def test_options_come_as_a_list(value: object) -> None:
    assert complaint(requests.checked_sbatch_args, value).startswith("use a list of sbatch's long options")


@pytest.mark.parametrize(
    "args, names, is_there",
    [
        (["--mem=4G"], ("--mem",), True),
        (["--mem-per-cpu=4G"], ("--mem",), False),
        (["--mem-per-cpu=4G"], requests.TWINS["memory_gb"], True),
        (["--mem=4G"], ("--mem-per-cpu",), False),
        (["--exclusive"], ("--exclusive",), True),
        (["--comment=--mem=4G"], ("--mem",), False),
        (["--cpus-per-task=4"], ("--cpus-per-task", "-c"), True),
        (["-c4"], ("--cpus-per-task", "-c"), True),
        (["--comment=x"], ("-c",), False),
        ([], ("--mem",), False),
    ],
)
def test_an_option_is_found_by_its_whole_name(args: list[str], names: tuple[str, ...], is_there: bool) -> None:
    assert requests.names_option(args, *names) is is_there


def test_of_options_that_exclude_each_other_the_last_level_stays() -> None:
    assert requests.joined(["--mem-per-cpu=4G", "--exclusive"], ["--mem=64G"]) == ("--exclusive", "--mem=64G")
    assert requests.joined(["--mem=1G"], [], ["--mem=2G"]) == ("--mem=2G",)
    assert requests.joined(["--cpus-per-gpu=4"], ["--cpus-per-task=2"]) == ("--cpus-per-task=2",)
    assert requests.joined(["--gres=nvme:1"], ["--gpus=2"]) == ("--gres=nvme:1", "--gpus=2")
    assert requests.joined() == ()

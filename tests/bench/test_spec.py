"""`experiment.yaml`: what is allowed, and one line with the place for what is not."""

import re
from pathlib import Path

import pytest

from stepsaver.bench.experiment import Condition, ConfigSpec, DecodingSpec, ExperimentSpec, Resources
from stepsaver.bench.experiment_file import read_experiment
from stepsaver.bench.folders import experiment_names, find_experiment
from stepsaver.bench.template import FILES
from stepsaver.cli import main
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.errors import UsageError
from stepsaver.engine.rules.rule import check_rules
from stepsaver.evaluation.task_registry import find_declaration
from tests.conftest import tiny_config
from tests.test_architecture import ROOT

GOOD = FILES["experiment.yaml"]
GRID = """\
question: q
tasks: [mini_gsm8k]
configs:
  grid: {k: [1, 2], layers: [first, last]}
  name: k{k}_{layers}
  rules: ["layer_reuse:k={k},layers={layers}"]
baseline: k1_first
success:
  confirm_if: {speed_up: "> 1.2", drop_points: "< 5"}
  reject_if: {speed_up: "< 1", drop_points: "> 20"}
"""


def write(folder: Path, text: str) -> Path:
    (folder / "experiment.yaml").write_text(text)
    return folder


def test_a_grid_is_filled_in_order(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path, GRID), layers=28)
    assert [config.name for config in experiment.configs] == ["k1_first", "k1_last", "k2_first", "k2_last"]
    assert experiment.config("k2_last").rules == ("layer_reuse:k=2,layers=last",)


def test_configs_and_grids_may_vary_policy_threshold_and_caches(tmp_path: Path) -> None:
    grid = """configs:
  grid: {p: [fixed, factor], cache: [true, false]}
  name: "{p}_{cache}"
  policy: "{p}"
  prefix_cache: "{cache}"
baseline: fixed_True
"""
    before, after = GRID[: GRID.index("configs:")], GRID[GRID.index("success:") :]
    found = read_experiment(write(tmp_path, before + grid + after)).configs
    assert [(each.name, each.policy, each.prefix_cache, each.rules) for each in found] == [
        ("fixed_True", "fixed", True, ()),
        ("fixed_False", "fixed", False, ()),
        ("factor_True", "factor", True, ()),
        ("factor_False", "factor", False, ()),
    ]
    listed = GOOD.replace("  - name: baseline\n", "  - {name: baseline, threshold: 0.95, block_cache: false}\n")
    first, _, second = read_experiment(write(tmp_path, listed + "decoding: {threshold: 0.8}\n")).configs
    assert (first.policy, first.block_cache) == ("threshold:threshold=0.95", False)
    assert (second.policy, second.block_cache) == (None, None)
    assert read_experiment(tmp_path).spec.decoding.policy == "threshold:threshold=0.8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GRID.replace("tasks:", "task:"), "line 2: task: unknown key"),
        (GRID + 'model: "\\ud800"\n', "line 11: half of a surrogate pair is no character"),
        (GRID.replace("baseline: k1_first", "baseline: k9"), "line 7: baseline 'k9' is no config"),
        (
            GRID.replace("layers: [first, last]", 'layers: [first, "3-4"]'),
            "line 4: the grid compares layer groups of un",
        ),
        (GRID.replace("layers: [first, last]", 'layers: [first, "17-28"]'), "line 6: layers"),
        (GRID.replace("k: [1, 2]", "k: [1, 1]"), "line 5: config k1_first stands there twice"),
        (GRID.replace("k{k}_{layers}", "k{kk}"), "pattern uses 'kk'"),
        (GRID.replace("layer_reuse", "layer_reus"), "line 6: unknown rule 'layer_reus'; nearest: layer_reuse"),
        (GRID.replace('"> 1.2"', '">= 1.2"'), "line 9: success.confirm_if.speed_up: '>= 1.2' is no condition"),
        (
            GRID + "decoding: {policy: fixed, threshold: 0.9}\n",
            "line 11: decoding: policy 'fixed' and threshold 0.9 exclude",
        ),
        (
            GRID.replace("name: k", "block_cache: maybe\n  name: k"),
            "configs: block_cache: 'maybe': Input should be a valid",
        ),
        (GRID.replace("name: k", 'threshold: "{t}"\n  name: k'), "pattern uses 't'"),
        (GRID + "batch_size: 0\n", "line 11: batch_size: Input should be greater than or equal to 1"),
        (GRID + "decoding: {policy: thresh}\n", "line 11: unknown policy 'thresh'"),
        (GRID + "decoding: {polic: thresh}\n", "line 11: decoding.polic: unknown key"),
        (GOOD.replace("name: my_rule", "name: my rule"), "configs.2.name"),
        (GOOD.replace("trim:level", "trm:level"), "line 7: unknown rule 'trm'"),
        (GOOD + "resources: {gpu: 1}\n", "resources.gpu: unknown key"),
        (GOOD + "resources: {minutes: soon}\n", "resources.minutes: "),
        (GOOD + "weights: float8\n", "weights: "),
        ("a: [", "is not YAML"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_experiment(write(tmp_path, text), layers=28)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_overlapping_groups_are_named_and_not_refused(tmp_path: Path) -> None:
    experiment = read_experiment(
        write(tmp_path, GRID.replace("[first, last]", "[middle, last]").replace("k1_first", "k1_last")), layers=28
    )
    assert experiment.remarks == ("layer groups middle and last share 4 layers",)


def test_groups_are_compared_where_the_depth_is_known_and_names_always_checked(tmp_path: Path) -> None:
    """The same two groups share layers at one depth and not at another: no depth is assumed."""
    overlapping = write(tmp_path, GRID.replace("[first, last]", '[first, "8-11"]'))
    assert read_experiment(overlapping).remarks == ()
    with pytest.raises(UsageError, match="unequal size: first has 12, 8-11 has 4"):
        read_experiment(overlapping, layers=28)
    with pytest.raises(UsageError, match="line 6: layers 'lasst'"):
        read_experiment(write(tmp_path, GRID.replace("[first, last]", "[first, lasst]")))


def test_conditions_read_back() -> None:
    assert str(Condition.parse("> 1.2")) == "> 1.2"
    assert Condition.parse("<-3").bound == -3


SIZES = {  # configs and tasks
    "00_baseline": (10, 3), "01_delta_reuse": (9, 3), "02_trim": (8, 3), "03_adaptive_skip": (8, 3),
    "04_combined": (10, 3), "05_suffix_dropout": (20, 4), "06_batch_1": (11, 1), "07_threshold_sweep": (17, 1),
    "08_tuned": (6, 2), "10_fast_dllm_v2_7b": (22, 10), "11_fast_dllm_v2_7b_batch_16": (22, 10),
}  # fmt: skip


def test_every_shipped_experiment_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names exist, its rules go together, and it is as large as it is said to be."""
    monkeypatch.chdir(ROOT)
    experiments = [find_experiment(name) for name in experiment_names()]
    assert {each.name: (len(each.configs), len(each.spec.tasks)) for each in experiments} == SIZES
    decoding = resolve_decoding(tiny_config(layers=28, block_size=32))
    for each in experiments:
        assert all(find_declaration(task) for task in each.spec.tasks)
        assert read_experiment(each.folder, layers=28).spec == each.spec
        for config in each.configs:
            check_rules(config.decoder(each.spec.decoding).rules, decoding, layers=28)


def test_the_paced_configs_are_paced_and_compared_with_their_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    experiment = find_experiment("05_suffix_dropout")
    assert experiment.baselines == ("baseline", "paced")
    for config in experiment.configs:
        is_paced = config.name.startswith("paced")
        assert is_paced == (config.policy == "threshold:at_most=2")
        assert experiment.baseline_of(config.name) == ("paced" if is_paced else "baseline")
        assert str(experiment.success_of(config.name).confirm_if.speed_up) == (
            "> 1.8" if config.success or is_paced else "> 1.7"
        )


@pytest.mark.parametrize("has_folder", [True, False])
def test_new_writes_a_valid_experiment_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, has_folder: bool
) -> None:
    """In `experiments/` if there is one, else in the current folder: never where the package is."""
    before = sorted((ROOT / "experiments").iterdir())
    if has_folder:
        (tmp_path / "experiments").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["new", "05_mine"]) == 0
    written = Path("experiments") / "05_mine" if has_folder else Path("05_mine")
    assert capsys.readouterr().out == f"{written}\n"
    assert sorted(path.name for path in written.iterdir()) == [
        "artifacts", "experiment.yaml", "proposal.md", "results.md", "tasks.md"
    ]  # fmt: skip
    experiment = find_experiment("05_mine")
    assert [config.name for config in experiment.configs] == ["baseline", "autoregressive", "my_rule"]
    assert "05_mine" in (experiment.folder / "proposal.md").read_text()
    assert main(["new", "05_mine"]) == 2
    assert main(["new", "../x"]) == 2
    assert sorted((ROOT / "experiments").iterdir()) == before


def test_the_template_has_every_key_with_what_it_is_for(tmp_path: Path) -> None:
    """Those that are commented out can be switched on as they stand, and change nothing."""
    everything = re.sub(r"(?m)^( *)# (?=[ \w]+:.*  # )", r"\1", GOOD)
    assert "# model" in GOOD
    assert not re.search(r"(?m)^ *# \w+:", everything)
    plain = read_experiment(write(tmp_path, GOOD), layers=28)
    switched_on = read_experiment(write(tmp_path, everything), layers=28)
    assert switched_on.spec == plain.spec
    for model in (ExperimentSpec, DecodingSpec, Resources, ConfigSpec):
        for name, field in model.model_fields.items():
            assert field.description, name
            assert re.search(rf"(?m)^[ -]*{name}:", everything), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GRID.replace("tasks:", "task:"), "line 2: task: unknown key; nearest: tasks"),
        (GRID + "decoding: {thresh: 1, join: off}\n", "line 11: decoding.thresh: unknown key"),
        (GRID + "resources: {minuts: 1}\n", "line 11: resources.minuts: unknown key; nearest: minutes"),
        (
            GRID.replace("tasks:", "task:").replace("confirm_if:", "confirm:") + "batch_sise: 1\nseed: x\n",
            "line 2: task: unknown key; nearest: tasks; line 9: success.confirm: unknown key; nearest: confirm_if; "
            "line 11: batch_sise: unknown key; nearest: batch_size, batch_size_elsewhere; line 12: seed: Input should",
        ),
        (
            GOOD.replace("trim:level", "trm:level").replace("baseline: baseline", "baseline: baselin"),
            "line 7: unknown rule 'trm'; nearest: trim; line 18: baseline 'baselin' is no config; there are baseline",
        ),
    ],
    ids=["one", "in decoding", "in resources", "four", "two names"],
)
def test_all_mistakes_are_said_at_once_with_their_lines_and_the_nearest_names(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        read_experiment(write(tmp_path, text), layers=28)
    assert message in str(error.value)


AXES = ", ".join(f"k{number}: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]" for number in range(10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "model: embedded\nmodel: other\n", "'model' stands there twice"),
        (GOOD.replace("name: my_rule", "name: my_rule\n    name: b"), "'name' stands there twice"),
        (GRID.replace("{k: [1, 2], layers: [first, last]}", "{" + AXES + "}"), "10000000000 combinations; 1000 are"),
        (GRID.replace("name: k{k}_{layers}", "name: k{0}"), "the pattern uses '0'"),
        (GRID.replace("name: k{k}_{layers}", "name: 'k{k[0]}'"), "the pattern uses 'k[0]'"),
        (GRID.replace("name: k{k}_{layers}", "name: 'k{k!r:>99999999}'"), "the pattern uses 'k!r:>99999999'"),
        (GOOD.replace("name: my_rule", "name: " + "a" * 300), "at most 100 characters"),
        (GOOD + f"seed: {1 << 64}\n", "seed: Input should be less than"),
        (GOOD + "decoding: {block_size: 10000000}\n", "block_size: Input should be less than or equal to 4096"),
        (GOOD.replace('"> 1.2"', f'"> 1{"0" * 400}"'), "no condition"),
        (GOOD.replace('"> 1.2"', "[[]]"), "no condition"),
        ("[" * 100_000, "is not YAML"),
        ("a: &a [*a, *a]\n" + GOOD, "unknown key"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_hostile_files_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_experiment(write(tmp_path, text))


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_bytes(b"question: \xff\xfe")
    with pytest.raises(UsageError, match="cannot read"):
        read_experiment(tmp_path)

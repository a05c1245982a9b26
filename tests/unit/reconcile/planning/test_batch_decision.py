"""Tests of jobs with batchSizeRange: plan, status, command line, and the batch size kept after the first checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlcontract import Plan, RankMeasure, Report, RunPhase
from dljob.api import API_VERSION, DLProfileStatus
from dljob.calibrate import Learned, NoiseOf
from dljob.cli import main
from dljob.job.observed import Observed
from dljob.job.profiles import learned, updated_profile
from support.builders import DIGITS, Json, after, changed, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, done, status, step, verdict

OPEN: Json = {**DIGITS, "globalBatchSize": 48, "batchSizeRange": {"max": 768}, "epochs": 10}
NOISY = {("digits-cnn", "cpu"): Learned(noise=NoiseOf("digits", 1e4 + 1 / 3, 1000))}
QUIET = {("digits-cnn", "cpu"): Learned(noise=NoiseOf("digits", 1.0, 1000))}
NOW = datetime(2026, 3, 1, tzinfo=UTC)
SAVED = {"step": 7, "unix_s": 1.0}


def running(spec: Json = OPEN, known: Mapping[tuple[str, str], Learned] = NOISY, **changes: Any) -> Observed:
    first = seen(spec, learned=known)
    observed = settled(after(first, step(first)))
    observed = replace(observed, report=report(observed, **changes))
    return after(observed, step(observed))


def choice(observed: Observed) -> Json:
    found: Json = observed.job.status["plan"]["batchChoice"]
    return found


def trained(observed: Observed) -> Plan:
    return plan_of(observed).plan


class TestPlan:
    def test_another_batch_size_changes_steps_and_learning_rate_rule(self) -> None:
        observed = running()
        plan, shown = trained(observed), choice(observed)
        assert plan.global_batch == shown["globalBatchSize"] > 48
        assert (plan.epochs, plan.steps) == (None, shown["steps"])
        assert plan.steps is not None and plan.steps < 300, "10 epochs of 30 steps"
        assert (plan.optimizer.scaling, plan.optimizer.base_batch) == ("AdaScale", 48)
        assert (shown["learningRateScaling"], shown["noiseScale"]) == ("AdaScale", 1e4)
        rows = {row["globalBatchSize"]: row for row in shown["candidates"]}
        assert [b for b, row in rows.items() if row["chosen"]] == [plan.global_batch]
        assert rows[48]["steps"] == 300 and rows[48]["efficiency"] == 1
        assert rows[plan.global_batch]["totalSeconds"] < rows[48]["totalSeconds"]
        message = condition_of(step(observed), "Planned").message
        assert f"global batch {plan.global_batch}: gradient noise scale 10000 samples, measured in one run" in message

    @pytest.mark.parametrize(
        ("optimizer", "scaling", "base"),
        [
            ({"name": "Adam"}, "SquareRoot", 48),
            ({"name": "AdamW", "learningRateScaling": {"rule": "Linear", "baseBatchSize": 32}}, "Linear", 32),
            ({"findLearningRate": True}, None, None),
        ],
    )
    def test_scaling_rule_is_the_users_or_fits_the_optimizer(self, optimizer: Json, scaling: str, base: int) -> None:
        plan = trained(running({**OPEN, "optimizer": optimizer}))
        assert plan.global_batch > 48
        assert (plan.optimizer.scaling, plan.optimizer.base_batch) == (scaling, base)

    @pytest.mark.parametrize(
        ("known", "text"),
        [
            ({}, "no run has measured the gradient noise scale"),
            (QUIET, "no other batch size improves the objective by more than 5 %"),
        ],
    )
    def test_plan_gives_the_reason_if_the_batch_size_is_unchanged(
        self, known: Mapping[tuple[str, str], Learned], text: str
    ) -> None:
        observed = running(OPEN, known)
        without = running({k: v for k, v in OPEN.items() if k != "batchSizeRange"}, known)
        assert trained(observed) == trained(without)
        assert choice(observed)["message"].startswith("stays 48") and text in choice(observed)["message"]
        assert "batchChoice" not in without.job.status["plan"]

    def test_batch_size_does_not_exceed_the_dataset(self) -> None:
        wide = {**OPEN, "dataset": {"name": "wine"}, "model": {"name": "mlp"}, "batchSizeRange": {"max": 10**6}}
        noise = {("mlp.wine", "cpu"): Learned(noise=NoiseOf("wine", 1e9, 1000))}
        rows = choice(running(wide, noise))["candidates"]
        assert max(row["globalBatchSize"] for row in rows) == 142

    def test_plan_only_shows_the_plan_and_runs_nothing(self) -> None:
        first = seen({**OPEN, "planning": {"mode": "PlanOnly"}}, learned=NOISY)
        shown = status(step(first)).plan
        assert shown is not None and shown.batch_choice is not None and len(shown.batch_choice.candidates) > 3
        assert after(first, step(first)).plan is None


class TestKeptBatchSize:
    """A checkpoint has one batch size. The job keeps it in spite of later measurements or edits."""

    def test_new_plan_has_the_batch_size_and_steps_of_the_checkpoint(self) -> None:
        observed = running(last_checkpoint=SAVED)
        was = trained(observed)
        edited = replace(changed(observed, seed=0, nodes={"min": 2, "max": 2}), learned=QUIET)
        empty = settled(after(edited, step(edited)))
        new = after(empty, step(empty))
        assert (trained(new).number, len(trained(new).ranks)) == (2, 2)
        assert (trained(new).global_batch, trained(new).steps) == (was.global_batch, was.steps)
        assert trained(new).optimizer == was.optimizer
        assert "which the job began with" in choice(new)["message"]

    def test_job_whose_plan_was_deleted_keeps_its_batch_size(self) -> None:
        observed = running(last_checkpoint=SAVED)
        lost = replace(observed, plan=None, learned=QUIET)
        away = after(lost, step(lost))
        assert status(step(away)) == status(step(lost)), (
            "a status that changes when it is read would be written endlessly"
        )
        empty = settled(away)
        assert trained(after(empty, step(empty))) == trained(observed)

    def test_new_range_starts_with_the_current_batch_size(self) -> None:
        observed = running({k: v for k, v in OPEN.items() if k != "batchSizeRange"}, last_checkpoint=SAVED)
        edited = replace(changed(observed, batchSizeRange={"max": 768}), learned=NOISY)
        assert verdict(step(edited), "Planned") == ("True", "Planned")
        empty = settled(after(edited, step(edited)))
        assert trained(after(empty, step(empty))).global_batch == 48

    @pytest.mark.parametrize("bounds", [{"max": 49}, None])
    def test_range_without_the_current_batch_size_is_rejected(self, bounds: Json | None) -> None:
        observed = running(last_checkpoint=SAVED)
        spec = {k: v for k, v in {**observed.job.spec, "batchSizeRange": bounds}.items() if v is not None}
        edited = replace(changed(observed), job=replace(observed.job, spec=spec, generation=2))
        desired = step(edited)
        assert verdict(desired, "Planned") == ("False", "CheckpointContradicted")
        batch = trained(observed).global_batch
        assert condition_of(desired, "Planned").message.startswith("spec.batchSizeRange: found 4")
        assert f"expected {batch}, as in the job's checkpoint of step 7" in condition_of(desired, "Planned").message
        assert desired.scales == ()

    def test_edit_before_the_first_checkpoint_chooses_again(self) -> None:
        observed = running()
        edited = replace(changed(observed, nodes={"min": 2, "max": 3}), learned=QUIET)
        empty = settled(after(edited, step(edited)))
        assert trained(after(empty, step(empty))).global_batch == 48


class TestLearning:
    def ended(self, samples: float, steps: int) -> Report:
        ranks = tuple(RankMeasure(rank=r, device="cpu", share=24, compute_s=0.01) for r in (0, 1))
        noise = {"samples": samples, "steps": steps}
        return Report(
            uid="u",
            plan_number=1,
            plan_digest="d",
            term=1,
            phase=RunPhase.SUCCEEDED,
            unix_s=0,
            ranks=ranks,
            noise=noise,
        )

    def test_run_updates_the_profile_for_the_next_plan(self) -> None:
        profile = updated_profile(DLProfileStatus(), "digits-cnn", "cpu", self.ended(900.0, 500), NOW, data="digits")
        again = DLProfileStatus.model_validate(json.loads(json.dumps(profile.manifest())))
        assert learned(again).noise == NoiseOf("digits", 900.0, 500)
        more = updated_profile(again, "digits-cnn", "cpu", self.ended(3600.0, 500), NOW, data="digits")
        assert more.noise_scale is not None
        assert (more.noise_scale.samples, more.noise_scale.runs) == (pytest.approx(1800), 2)
        same_samples_on_all_ranks = updated_profile(more, "digits-cnn", "cpu", self.ended(0.0, 500), NOW, data="digits")
        assert same_samples_on_all_ranks.noise_scale is not None
        assert same_samples_on_all_ranks.noise_scale.samples == pytest.approx(1800 ** (2 / 3)), "counted as one run"
        unmeasured = self.ended(1.0, 500).model_copy(update={"noise": None})
        assert (
            updated_profile(more, "digits-cnn", "cpu", unmeasured, NOW, data="digits").noise_scale == more.noise_scale
        )

    def test_measurements_are_stored_under_the_dataset(self) -> None:
        desired = step(done(noise={"samples": 900.0, "steps": 500}, step_s=0.5))
        assert desired.measurements is not None and desired.measurements.data == "digits"
        assert desired.measurements.report.noise is not None
        measured = status(desired).measured
        assert measured is not None and measured.noise_scale == 900

    @pytest.mark.parametrize("samples", ["-1", "NaN", "1e400", '"many"'])
    def test_invalid_report_is_ignored(self, samples: str) -> None:
        text = self.ended(1.0, 500).to_json().replace('"samples":1.0', f'"samples":{samples}')
        with pytest.raises(ValueError, match=r"noise\.samples"):
            Report.parse(text)


class TestCommandLine:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        job = {"apiVersion": API_VERSION, "kind": "DLJob", "metadata": {"name": "open"}, "spec": OPEN}
        noise = {"data": "digits", "samples": 1e4, "steps": 1000, "runs": 3}
        profile = {
            "apiVersion": API_VERSION, "kind": "DLProfile", "metadata": {"name": "p"},
            "spec": {"model": "digits-cnn", "device": "cpu"}, "status": {"noiseScale": noise},
        }  # fmt: skip
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        (tmp_path / "cluster.yaml").write_text("nodes: [{name: n, count: 3, cpu: 2}]")
        (tmp_path / "profiles.yaml").write_text(yaml.safe_dump({"kind": "List", "items": [profile]}))
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def test_plan_prints_a_table_of_batch_sizes(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--profiles", "profiles.yaml", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["plan"]["batchChoice"]
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--profiles", "profiles.yaml"]) == 0
        text = capsys.readouterr().out
        chosen, steps = shown["globalBatchSize"], shown["steps"]
        assert text.startswith(f"open: digits-cnn, {steps} steps of {chosen} samples, minimize time\n")
        assert "Global batch: gradient noise scale 10000 samples, measured in 3 runs" in text
        assert "Learning rate: scaled by AdaScale from batch size 48" in text
        table = text[text.index("  GLOBAL BATCH") :].splitlines()
        assert table[0].split() == [
            "GLOBAL",
            "BATCH",
            "EFFICIENCY",
            "STEP",
            "STEPS",
            "SAME",
            "PROGRESS",
            "ENERGY",
            "COST",
        ]
        (marked,) = [line for line in table if line.startswith("* ") and " % " in line and "#" not in line]
        assert marked.split()[1] == str(chosen)

    def test_job_without_profiles_prints_one_line(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml"]) == 0
        text = capsys.readouterr().out
        assert (
            "\nGlobal batch: stays 48, because no run has measured the gradient noise scale of this model on this data"
            in text
        )
        assert "GLOBAL BATCH" not in text and "Learning rate" not in text

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--profiles", "profiles.yaml"], "--profiles: found this option without --cluster"),
            (["--cluster", "cluster.yaml", "--profiles", "job.yaml"], "job.yaml: found no DLProfile"),
            (["--cluster", "cluster.yaml", "--profiles", "wrong.yaml"], "wrong.yaml: profiles[0].status.noiseScale"),
        ],
    )
    def test_invalid_profiles_are_rejected(
        self, folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = (folder / "profiles.yaml").read_text().replace("samples: 10000.0", "samples: .inf")
        (folder / "wrong.yaml").write_text(text)
        assert main(["plan", "job.yaml", *arguments]) == 2
        assert words in capsys.readouterr().err

    def test_profiles_of_another_model_give_a_warning(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        text = (folder / "profiles.yaml").read_text().replace("model: digits-cnn", "model: mlp")
        (folder / "other.yaml").write_text(text)
        assert main(["plan", "job.yaml", "--cluster", "cluster.yaml", "--profiles", "other.yaml"]) == 0
        assert "open: --profiles: found mlp; expected digits-cnn. " in capsys.readouterr().err

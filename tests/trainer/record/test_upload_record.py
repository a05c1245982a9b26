"""Tests of the coordinator's record of uploads: counts, steps of checkpoints, and what a new coordinator knows."""

from hypothesis import given
from hypothesis import strategies as st

from dlcontract import Report, RunPhase, Upload, Uploads
from dltrain.agent import metrics
from dltrain.protocol.rank_messages import RankMessage, Step
from dltrain.protocol.upload_messages import NotUploaded, Uploaded
from dltrain.record.ledger import Ledger
from dltrain.record.run_report.document import Checkpoint, Document
from dltrain.record.run_report.history import History
from dltrain.record.run_report.page import page
from dltrain.record.upload_record import STEP_S, UploadRecord
from support.trainer.plans import make_plan

PLAN = make_plan(1, global_batch=1, steps=100)


def made(number: int, duration_s: float | None = 2.0, age_s: float | None = 0.0) -> Uploaded:
    upload = Upload(
        unix_s=10.0 * number, path=f"s3://b/{number}", name="c", nbytes=5, new_nbytes=3, duration_s=duration_s
    )
    return Uploaded(upload=upload, age_s=age_s)


def step(number: int) -> Step:
    return Step(rank=0, step=number, steps=100, step_s=1.0, samples_per_s=1, world_size=1, reported=True)


def reported(ledger: Ledger) -> Uploads:
    found = Report.parse(ledger.report(5.0).to_json()).uploads
    assert found is not None
    return found


def test_uploads_are_counted_and_the_last_one_is_reported() -> None:
    ledger = Ledger(PLAN, None)
    assert ledger.report(5.0).uploads is None, "not a job whose folder is uploaded"
    assert ledger.record(Uploaded(upload=None), 0.0) and reported(ledger) == Uploads()
    assert ledger.record(made(1), 1.0) and ledger.record(made(2), 2.0)
    found = reported(ledger)
    assert (found.count, found.seconds, found.nbytes) == (2, 4.0, 6) and found.last == made(2).upload
    assert ledger.silent_rank(1e9) is None, "an upload is no progress of a rank, so silence after it is no hang"


def exported(ledger: Ledger) -> dict[str, float]:
    return {s.name.removeprefix(metrics.PREFIX): s.value for f in metrics._upload_metrics(ledger) for s in f.samples}


def test_metrics_of_uploads() -> None:
    ledger = Ledger(PLAN, None)
    ledger.mark_start(launched_unix_s=100.0)
    assert exported(ledger) == {}, "not a job whose folder is uploaded"
    ledger.record(Uploaded(upload=None), 0.0)
    before = {"uploads_total": 0, "upload_failures_total": 0, "upload_seconds_total": 0, "upload_bytes_total": 0}
    assert exported(ledger) == before | {"upload_timestamp_seconds": 100.0}, "the alert counts from the launch"
    ledger.record(NotUploaded(reason="UploadFailed", message="a", failed=True, unix_s=1.0), 1.0)
    ledger.record(made(20), 2.0)
    assert exported(ledger) == {
        "uploads_total": 1, "upload_failures_total": 1, "upload_seconds_total": 2.0, "upload_bytes_total": 3,
        "upload_timestamp_seconds": 200.0, "upload_size_bytes": 5,
    }  # fmt: skip


def test_run_report_lists_uploads_as_checkpoints() -> None:
    history = History(PLAN, 100.0)
    history.record(Uploaded(upload=None), 0, 101.0)
    history.record(made(11), 0, 110.0)
    history.record(made(11, duration_s=None), 0, 111.0)
    document = Document.parse(history.document(RunPhase.RUNNING, 1, 200.0).to_json())
    assert document.checkpoints == (Checkpoint(step=0, unix_s=110.0, duration_s=2.0, nbytes=5),)
    assert (document.totals.checkpoints, document.totals.checkpoint_s) == (1, 2.0)
    assert "1, of 5 B" in page(document)


def test_commit_with_new_logs_only_keeps_the_step() -> None:
    ledger = Ledger(PLAN, None)
    ledger.record(step(7), 1.0)
    ledger.record(ledger.uploads.with_step(made(1, age_s=3.0), 5.0), 5.0)
    ledger.record(step(9), 6.0)
    ledger.record(ledger.uploads.with_step(made(2, age_s=None), 7.0), 7.0)
    last = reported(ledger).last
    assert last is not None and (last.path, last.step) == ("s3://b/2", 7)


def test_step_of_an_upload_after_a_restart_is_unknown_until_the_script_reports_one() -> None:
    """Fixed bug: a checkpoint that was written before the first report had the last step before the restart."""
    ledger = Ledger(PLAN, None)
    ledger.begin_attempt(PLAN, 0.0)
    ledger.record(step(50), 10.0)
    ledger.begin_attempt(PLAN, 20.0)  # The ranks resume from step 30.

    def shown(number: int, age_s: float, now_s: float) -> int | None:
        ledger.record(ledger.uploads.with_step(made(number, age_s=age_s), now_s), now_s)
        last = reported(ledger).last
        assert last is not None
        return last.step

    assert shown(1, 9.0, 21.0) == 50, "files that were complete before the restart"
    assert shown(2, 5.0, 30.0) is None
    ledger.record(step(40), 31.0)
    assert shown(3, 1.0, 35.0) == 40


def test_problem_stays_until_uploads_work_and_keeps_its_first_time() -> None:
    ledger = Ledger(PLAN, None)
    assert ledger.record(NotUploaded(reason="UploadFailed", message="a", failed=True, unix_s=1.0), 1.0)
    assert not ledger.record(NotUploaded(reason="UploadFailed", message="b", failed=True, unix_s=2.0), 2.0)
    found = reported(ledger)
    assert found.problem is not None and found.failures == 2
    assert (found.problem.unix_s, found.problem.message) == (1.0, "b")
    assert ledger.record(NotUploaded(reason="FolderChanges", message="c", unix_s=3.0), 3.0)
    assert ledger.record(NotUploaded(), 4.0) and not ledger.record(NotUploaded(), 4.0)
    assert (reported(ledger).problem, reported(ledger).failures) == (None, 2)
    ledger.record(NotUploaded(reason="UploadFailed", message="a", failed=True, unix_s=5.0), 5.0)
    ledger.record(made(1), 6.0)
    assert reported(ledger).problem is None


def test_store_that_can_be_read_need_not_take_files() -> None:
    """After minutes of errors, the ranks restart. The condition must not say that uploads work until one does."""
    ledger = Ledger(PLAN, None)
    for reason, stays in (("UploadFailed", True), ("FolderChanges", False), ("PartsMissing", False)):
        ledger.record(NotUploaded(reason=reason, message="a", unix_s=1.0), 1.0)
        ledger.record(made(1, duration_s=None, age_s=None), 2.0)
        assert (reported(ledger).problem is not None) == stays
        ledger.record(made(2), 3.0)
        assert reported(ledger).problem is None


def test_new_coordinator_knows_the_step_of_the_commit_with_which_it_resumes() -> None:
    ledger = Ledger(PLAN, None)
    ledger.record(step(7), 1.0)
    ledger.record(ledger.uploads.with_step(made(1, age_s=3.0), 5.0), 5.0)
    again = Ledger(PLAN, Report.parse(ledger.report(5.0).to_json()))
    again.record(made(1, duration_s=None, age_s=None), 0.0)
    found = reported(again)
    assert found.last is not None and found.count == 1
    assert (found.last.step, found.last.duration_s) == (7, 2.0), "the store knows neither"
    again.record(made(0, duration_s=None, age_s=None), 0.0)
    older = reported(again).last
    assert older is not None and (older.path, older.step) == ("s3://b/0", None), "the newer one was damaged"
    again.record(Uploaded(upload=None), 0.0)
    assert reported(again).last is None, "someone has emptied the bucket"


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3)), max_size=20),
    st.floats(0, 200),
    st.floats(0, 100),
)
def test_step_of_a_checkpoint_was_reported_before_it_was_written(
    reports: list[tuple[float, int]], later_s: float, age_s: float
) -> None:
    record, now_s, number, history = UploadRecord(), 0.0, 0, []
    for wait_s, more in reports:
        now_s, number = now_s + wait_s, number + more
        record.stepped(number, now_s)
        history.append((now_s, number))
    now_s += later_s
    message: RankMessage = record.with_step(made(1, age_s=age_s), now_s)
    assert isinstance(message, Uploaded) and message.upload is not None
    before = [step for time_s, step in history if time_s <= now_s - age_s]
    recent = [step for time_s, step in history if time_s <= now_s - age_s - STEP_S]
    found = message.upload.step
    assert (found is None) == (not before)
    if found is not None:
        assert max(recent, default=0) <= found <= max(before)

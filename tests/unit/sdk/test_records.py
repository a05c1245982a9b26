"""Tests of the SDK: the output and the run report of jobs that have ended."""

import gzip
import json
from pathlib import Path

import pytest

from dljob.kube.kinds import CONFIG_MAP, POD
from dljob.sdk import Client, DLJobError
from support.servers.threaded_api import ThreadedApiServer
from support.specs.small_specs import JOB
from support.stored_records import put_records, stored_records


class TestRecords:
    def test_logs_and_report_of_a_job_that_has_ended(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        files = {"report.json.gz": json.dumps({"steps": 3}), "report.html.gz": "<html>"}
        put_records(api, {"rank-0.log.gz": "zero", "rank-1.log.gz": "one", **files})
        assert job.logs() == {0: "zero", 1: "one"} and job.logs(rank=1) == {1: "one"}
        assert job.report() == {"steps": 3} and job.report_html() == "<html>"
        with pytest.raises(DLJobError, match="expected rank 7"):
            job.logs(rank=7)

    def test_lines_of_a_running_job_are_followed_to_its_end(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        meta = {"name": f"{job.name}-cpu-0", "namespace": job.namespace}
        status = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        api.put(POD, {"metadata": meta, "status": status})
        api.write_log(meta["name"], "[agent] up", "[rank 0] zero", "[rank 1] one")
        lines = job.follow_logs(rank=1)
        assert next(lines) == "one"
        api.write_log(meta["name"], "[rank 1] two")
        assert next(lines) == "two"
        api.report_status(job.name, phase="Complete")
        api.end_log(meta["name"])
        assert list(lines) == []

    @pytest.mark.parametrize(
        "content",
        [b"no gzip", b"", gzip.compress(b'{"steps": 3}')[:-9], gzip.compress(b'{"steps": 3'), gzip.compress(b"[]")],
        ids=["no gzip", "empty", "cut", "no JSON", "no object"],
    )
    def test_damaged_report_is_named(self, content: bytes, client: Client, api: ThreadedApiServer) -> None:
        """Fixed bug: the call raised zlib.error or JSONDecodeError."""
        job = client.submit(JOB)
        api.put(CONFIG_MAP, stored_records({"report.json.gz": content}))
        with pytest.raises(
            DLJobError, match=r"report\.json\.gz in ConfigMap a-logs: found a damaged entry.*get-model a"
        ):
            job.report()

    def test_damaged_output_of_one_rank_leaves_that_of_the_others(self, client: Client, api: ThreadedApiServer) -> None:
        job = client.submit(JOB)
        api.put(CONFIG_MAP, stored_records({"rank-0.log.gz": gzip.compress(b"fine"), "rank-1.log.gz": b"no gzip"}))
        assert job.logs(rank=0) == {0: "fine"}
        for rank in (1, None):
            with pytest.raises(DLJobError, match=r"rank-1\.log\.gz in ConfigMap a-logs: found a damaged entry"):
                job.logs(rank)

    def test_running_job_has_no_records(self, client: Client, tmp_path: Path) -> None:
        job = client.submit(JOB)
        for call in (job.logs, job.report, job.report_html, lambda: job.model(tmp_path / "model")):
            with pytest.raises(DLJobError, match="expected"):
                call()

"""Tests that image builds use this machine's pip configuration without storing it in the image."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from devcluster.images import pip_config

LISTED = """\
global.cert='/no/such/bundle.pem'
global.extra-index-url='file:///srv/index/simple https://user:secret@pypi.example/simple'
global.find-links='/srv/wheels'
global.index-url='https://pypi.example/a'
install.index-url='https://pypi.example/b'
freeze.timeout='10'
:env:.find-links='/other/wheels'
"""


def test_precedence_matches_pip() -> None:
    plain = pip_config.parse(LISTED, {})
    assert plain.options["index-url"] == ("https://pypi.example/b",)
    assert plain.options["find-links"] == ("/srv/wheels",)
    assert plain.options["extra-index-url"][1] == "https://user:secret@pypi.example/simple"
    assert "timeout" not in plain.options
    assert pip_config.parse(LISTED, {"PIP_FIND_LINKS": "/x /y"}).options["find-links"] == ("/x", "/y")


def test_only_an_existing_certificate_bundle_is_passed_on(tmp_path: Path) -> None:
    assert pip_config.parse(LISTED, {}).ca_bundle is None
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    config = pip_config.parse(LISTED, {"PIP_CERT": str(bundle)})
    assert config.ca_bundle == bundle
    assert f"cert = {pip_config.CA_IN_BUILD}" in pip_config.render(config, {})


def test_parsed_configuration_matches_pip(tmp_path: Path) -> None:
    conf = tmp_path / "pip.conf"
    conf.write_text("[global]\nindex-url = https://pypi.example/simple\nfind-links =\n    /a/b\n    /c/d\n")
    config = pip_config.parse(_listed_by_pip(conf), {})
    assert config.options["index-url"] == ("https://pypi.example/simple",)
    assert config.options["find-links"] == ("/a/b", "/c/d")


def test_pip_reads_the_rendered_configuration(tmp_path: Path) -> None:
    config = pip_config.parse(LISTED, {})
    conf = tmp_path / "pip.conf"
    conf.write_text(pip_config.render(config, {"/srv/wheels": "http://127.0.0.1:1/"}))
    again = pip_config.parse(_listed_by_pip(conf), {})
    assert again.options == {**config.options, "find-links": ("http://127.0.0.1:1/",)}


def _listed_by_pip(conf: Path) -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    environment = {"PIP_CONFIG_FILE": str(conf), "PATH": "/usr/bin:/bin", "HOME": str(conf.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_local_packages_are_served_during_a_build(tmp_path: Path) -> None:
    index, wheels = tmp_path / "index" / "simple" / "thing", tmp_path / "wheels"
    index.mkdir(parents=True)
    wheels.mkdir()
    (index / "index.html").write_text("links")
    (tmp_path / "index" / "files").mkdir()
    (tmp_path / "index" / "files" / "thing.whl").write_text("beside the index")
    (wheels / "local.whl").write_text("wheel")
    simple = (tmp_path / "index" / "simple").as_uri()
    config = pip_config.parse(f"global.index-url='{simple}'\nglobal.find-links='{wheels} /no/such/folder'", {})
    with pip_config.serving(config) as served:
        assert set(served) == {simple, str(wheels)}
        assert _get(served[simple] + "thing/") == "links"
        assert _get(served[simple] + "../files/thing.whl") == "beside the index"
        assert _get(served[str(wheels)] + "local.whl") == "wheel"
        assert served[simple] in pip_config.render(config, served)
        address = served[simple]
    with pytest.raises(OSError, match="refused"):
        _get(address)


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    ("location", "folder"),
    [
        ("file:///a%20b/c", Path("/a b/c")),
        ("file://localhost/a", Path("/a")),
        ("/a/b", Path("/a/b")),
        ("https://pypi.example/simple", None),
        ("relative", None),
    ],
)
def test_local_locations_are_recognized(location: str, folder: Path | None) -> None:
    assert pip_config.local_folder(location) == folder


def test_proxy_settings_are_passed_on() -> None:
    environment = {"https_proxy": "http://proxy.example:3128", "NO_PROXY": "", "OTHER": "x"}
    assert pip_config.proxies(environment) == {"https_proxy": "http://proxy.example:3128"}

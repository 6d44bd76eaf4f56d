import sys

import pytest

from memjax.own_code import load_own


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_file_is_loaded_once_and_may_import_its_neighbours(here):
    (here / "sub").mkdir()
    (here / "sub" / "beside_it.py").write_text("WORD = 'hello'\n")
    (here / "sub" / "mine.py").write_text("from beside_it import WORD\nclass Kind:\n    def f(self): return WORD\n")
    kind = load_own("sub/mine.py:Kind", "agent")
    assert kind().f() == "hello"
    assert load_own(f"{here}/sub/mine.py:Kind", "agent") is kind


def test_a_module_of_the_current_directory_is_found(here):
    (here / "in_the_current_directory.py").write_text("def score(): return 1\n")
    assert load_own("in_the_current_directory:score", "reward")() == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.py:f", "there is no file gone.py, which should hold the agent f"),
        ("gone_module:f", "there is no module gone_module"),
        ("mine.py:reed", "did you mean read"),
        ("mine.py:", "path/to/file.py:name"),
        ("broken.py:f", r"SyntaxError.*broken.py, line 2"),
        ("exits.py:f", r"the agent exits.py:f could not be imported: SystemExit: 0 \(.*exits.py, line 2\)"),
        ("raises.py:f", r"ZeroDivisionError: division by zero \(.*raises.py, line 1\)"),
    ],
)
def test_what_cannot_be_loaded_is_told(here, name, said):
    (here / "mine.py").write_text("def read(): ...\n")
    (here / "broken.py").write_text("x = 1\ndef f(:\n")
    (here / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (here / "raises.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=said):
        load_own(name, "agent")

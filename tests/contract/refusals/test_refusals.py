"""Invalid arguments of the public functions and classes raise the errors in the files here."""

import doctest
from pathlib import Path

import pytest
from contract.refusals.update import SESSION, error_of

FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.txt"))}


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_each_call_raises_the_error_below_it(path):
    names, different = {}, []
    is_as_expected = doctest.OutputChecker().check_output
    for example in SESSION.get_examples(path.read_text()):
        error = error_of(example.source, names)
        if not is_as_expected(example.want, error, doctest.ELLIPSIS):
            different.append(f"{example.source}{error}instead of\n{example.want}")
    assert not different, "\n".join(different)

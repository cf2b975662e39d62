"""Files of a cache folder in every form, and edited documents; `scripts/attack files` makes thousands."""

from __future__ import annotations

import random

from tests.hostile.files import run


def test_no_file_of_a_cache_folder_stops_a_command_or_leads_out_of_the_folder() -> None:
    assert run(random.Random(23), 60)["succeeded"] == []

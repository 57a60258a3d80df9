"""Job profiles: the next process of a program fetches the entries that this one used, at once.

*Promises*: a profile only lists downloads, each of which is verified; a lookup never waits for it.

*Subscribes to*: ``used``, ``dropped``, ``remote_opened`` and ``finishing``.

*Without it*: each entry is fetched when it is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from s3cache.seam import Feature
from s3cache.util.options import FLAG, option

#: The prefix of the keys of profiles.
KEYS = "job-profile-"


@dataclass(frozen=True, kw_only=True)
class JobProfileOptions:
    """The options of job profiles."""

    job_profiles: bool = option(True, FLAG)


FEATURE = Feature(
    name="job_profile",
    does="fetching what a program used before",
    options=JobProfileOptions,
    kinds=("job",),
    hints=(KEYS,),
    is_used=lambda settings: settings.job_profiles,
    begins=f"{__name__}.profile:begin",
    # So that a fresh machine always hits the remote, and not what was fetched before.
    testing=(("S3CACHE_JOB_PROFILES", "0"),),
)

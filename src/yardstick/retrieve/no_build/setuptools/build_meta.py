"""A build backend that refuses to build and answers pip's question for metadata without running any setup.py.

`pip download` of an sdist asks the build backend for the package's metadata, which for setuptools means running the
package's own setup.py. We want the archive and nothing executed, so pip is started with this folder on its path.
"""

import os
from pathlib import Path


class _Backend:
    def prepare_metadata_for_build_wheel(self, metadata_directory, config_settings=None):
        name, version = os.environ["YARDSTICK_SDIST_NAME"], os.environ["YARDSTICK_SDIST_VERSION"]
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        path = Path(metadata_directory) / folder
        path.mkdir()
        (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return folder

    def build_wheel(self, *args, **kwargs):
        raise RuntimeError("yardstick never builds a downloaded package")


__legacy__ = _Backend()
prepare_metadata_for_build_wheel = __legacy__.prepare_metadata_for_build_wheel
build_wheel = __legacy__.build_wheel

# The front door. Each target works on its own on a bare Debian 12 or Ubuntu 24.04.

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
# What `make lint` compares with.
BASE ?= main

.PHONY: build demo test test-torch bench install package lint clean

build:
	@scripts/setup.sh build
	@cmake --preset release
	@cmake --build --preset release -j $(JOBS) --target lockstep

demo: build
	@scripts/demo.sh

test:
	@scripts/setup.sh test
	@JOBS=$(JOBS) scripts/test.sh

# The Python package with the newest PyTorch of PyPI.
test-torch:
	@scripts/setup.sh test
	@cmake --preset release
	@cmake --build --preset release -j $(JOBS) --target lockstep_shared lockstep_portable
	@scripts/test_torch.sh

bench:
	@scripts/setup.sh bench
	@$(MAKE) --no-print-directory build
	@bench/run.sh

# To /usr/local as root; elsewhere with PREFIX=..., staged with DESTDIR=...
install: build
	cmake --install build/release --prefix $(PREFIX)

# Two .deb for this distribution, and a tarball of the command for any.
package:
	@scripts/setup.sh package
	@cmake --preset release
	@cmake --build --preset release -j $(JOBS) --target packages
	@ls -1 build/release/packages/*.deb build/release/packages/*.tar.gz

lint:
	@scripts/setup.sh lint
	@scripts/lint.sh $(BASE)

clean:
	rm -rf build

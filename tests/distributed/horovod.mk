# Horovod has no wheel for MXNet, so one is built, in a separate environment, as it needs an old
# setuptools, but with the MXNet of .venv. pip's cache is not used, as it may hold a wheel for other
# frameworks.
horovod := horovod==0.28.1
horovod_wheels := "$(HOROVOD_CACHE)/horovod-mxnet-$(MXNET)"
install_horovod = $(pip) install --no-index --no-deps --force-reinstall --find-links $(horovod_wheels) $(horovod)
build_horovod = rm -rf build/horovod && $(python) -m venv build/horovod && \
    build/horovod/bin/pip --no-input install 'setuptools<70' wheel cffi cloudpickle 'cmake<4' packaging psutil pyyaml && \
    $(python) -c 'import sysconfig; print("import sys; sys.path.append(%a)" % sysconfig.get_path("purelib"))' \
        >"$$(build/horovod/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/with_mxnet.pth" && \
    env -u MAKEFLAGS PATH="$$PWD/build/horovod/bin:$$PATH" PYTHONPATH="$$PWD/mxnet_compat/site" HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 \
        HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
        nice build/horovod/bin/pip --no-input --no-cache-dir wheel --no-deps --no-build-isolation \
        --wheel-dir $(horovod_wheels) $(horovod) && \
    rm -rf build/horovod

# If it cannot be built, everything else continues: Horovod is one of two stores.
$(ready)horovod: pyproject.toml $(environment)
	@echo "Installing Horovod"
	@mkdir -p build
	@if { $(install_horovod) 2>/dev/null || { \
	        echo "Building Horovod, once, which takes some minutes (build/horovod.log)"; \
	        { $(build_horovod) && $(install_horovod); } >build/horovod.log 2>&1; \
	    }; } && $(pip) install 'gluon_syncbn[horovod]'; then \
	    echo installed >$@; \
	else \
	    echo missing >$@; \
	    echo "Horovod could not be built (build/horovod.log says why), so nothing of it is tested." \
	        "To try again: rm $@" >&2; \
	fi

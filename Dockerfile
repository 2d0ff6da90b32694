# The image of Dataflow's workers, and the launcher of the Flex Template; docs/dataflow.md says how to build it.

# It only gives the launcher's program.
FROM gcr.io/dataflow-templates-base/python311-template-launcher-base:20240812-rc01 AS launcher

# The same versions of Python and Beam as in requirements.lock: they read what the launcher pickled.
FROM apache/beam_python3.11_sdk:2.77.0

# tpu, cuda12 or cuda13: what jax[...] needs for the device.
ARG ACCELERATOR=tpu

WORKDIR /opt/lightmill
COPY requirements.lock pyproject.toml setup.py README.md LICENSE ./
COPY pipeline pipeline
COPY transforms transforms
COPY model_handlers model_handlers
RUN pip install --no-cache-dir --constraint requirements.lock . "jax[${ACCELERATOR}]"

# A folder named checkpoint beside this file is baked in; workers then start without a download.
COPY LICENSE checkpoint* checkpoint/

# In a folder of its own, since Python looks for modules where the program lies first.
COPY pipeline/template.py launcher/
COPY --from=launcher /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher
ENV FLEX_TEMPLATE_PYTHON_PY_FILE=/opt/lightmill/launcher/template.py

# Loads the checkpoint in the package and makes a picture of it, on the CPU, which is all that a build has.
RUN lightmill selftest --device=cpu

ENTRYPOINT ["/opt/apache/beam/boot"]

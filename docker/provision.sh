#!/usr/bin/env bash
# Provisions the queue of each example DAG, and draws the images of the DAG image_conversion; safe to run at every start.
set -euo pipefail

# The other files in the folder declare these queues in another form, which no example DAG uses.
for queue in exports images invoices jobs orders orders_by_event orders_payload payments readings store surveys tasks; do
  jetstream-queue queue apply "queues/${queue}.yaml"
done

python sample_images.py "${IMAGES}/input" "${IMAGES}/output"

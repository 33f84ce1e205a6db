#!/bin/sh
# Packs the programs of Debian's package like upstream's archives: pack.sh BUILD TARGET. The programs find their libraries through $ORIGIN.
set -e
build=$1 target=$2
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qqy install --no-install-recommends llama.cpp-tools llama.cpp-tools-extra libggml0-backend-rpc libggml0-backend-vulkan patchelf >/dev/null
work=$(mktemp -d)
folder=$work/llama-b$build
mkdir -p "$folder" "$target"
cp /usr/bin/llama-server /usr/libexec/*/llama/bin/ggml-rpc-server "$folder"
ldd "$folder"/llama-server | awk '$3 ~ /lib(llama|ggml|mtmd)/ {print $3}' | xargs cp -L -t "$folder"
cp -L /usr/lib/*/ggml/backends0/*.so "$folder"
# shellcheck disable=SC2016 # the dynamic linker expands it
patchelf --set-rpath '$ORIGIN' "$folder"/*
tar -czf "$target/llama-b$build-bin-ubuntu-vulkan-x64.tar.gz" -C "$work" "llama-b$build"
tar -czf "$target/llama-b$build-bin-ubuntu-x64.tar.gz" -C "$work" --exclude=libggml-vulkan.so "llama-b$build"
rm -r "$work"

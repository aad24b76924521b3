#!/bin/sh
# Tries the README's commands as a new user of another Debian or Ubuntu would: in a folder that debootstrap
# fills with that release's own packages, and in a clone of this checkout. Needs root and debootstrap.
# Usage: test_debian.sh RELEASE [COMMAND…]   (default: "make demo" "make test")
#
# The folder is made in TMPDIR (/var/tmp), takes some 10 GB, and is removed at the end unless a command
# fails. Packages come from where this machine's apt and pip take theirs. Processes and mounts are in
# namespaces of their own, so nothing is left when this script ends, however it ends.
set -eu

release=${1:-}
if [ -z "$release" ]; then
    echo "error: which release? For example: make test-debian RELEASE=trixie" >&2
    exit 2
fi
shift
[ $# -gt 0 ] || set -- "make demo" "make test"
if [ "$(id -u)" != 0 ]; then
    echo "error: debootstrap needs root; run: sudo make test-debian RELEASE=$release" >&2
    exit 1
fi
for program in debootstrap git unshare; do
    if ! command -v "$program" >/dev/null 2>&1; then
        echo "error: there is no program $program; run: apt-get install -y debootstrap git util-linux" >&2
        exit 1
    fi
done
# debootstrap makes all of Ubuntu by one script, and that of Debian 12 knows no noble.
case $release in
    jammy | noble)
        system=Ubuntu like=jammy components=main,universe keys=ubuntu-keyring
        keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg usual=http://archive.ubuntu.com/ubuntu
        ;;
    *)
        system=Debian like=$release components=main keys=debian-archive-keyring
        keyring=/usr/share/keyrings/debian-archive-keyring.gpg usual=http://deb.debian.org/debian
        ;;
esac
if [ ! -e "/usr/share/debootstrap/scripts/$like" ]; then
    echo "error: debootstrap knows no release $release; newer ones need a newer debootstrap" >&2
    exit 2
fi
if [ ! -e "$keyring" ]; then
    echo "error: the keys that sign $system's packages are not here ($keyring); Debian 13 and Ubuntu have them: apt-get install -y $keys" >&2
    exit 1
fi
mirror=$(apt-get indextargets --format '$(REPO_URI)' "Origin: $system" "Label: $system" 2>/dev/null | sort -u | head -n 1)
checkout=$(cd "$(dirname "$0")/.." && pwd)
root=$(mktemp -d "${TMPDIR:-/var/tmp}/hvd_elastic-$release.XXXXXX")
chmod 755 "$root"
log=$root.log
trap 'rm -rf --one-file-system "$root" "$log"' EXIT
trap 'exit 130' INT TERM

echo "Making $release in $root"
# what a user has before reading the README; make installs the rest
if ! debootstrap --force-check-gpg --keyring="$keyring" --components="$components" --variant=minbase \
    --include=ca-certificates,git,make,python3 "$release" "$root" "${mirror:-$usual}" "/usr/share/debootstrap/scripts/$like" >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    echo "error: debootstrap failed; the whole log: $log" >&2
    trap 'rm -rf --one-file-system "$root"' EXIT
    exit 1
fi
cp /etc/resolv.conf "$root/etc/resolv.conf"
# as Debian's installer writes it
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" >"$root/etc/hosts"
cp -r /usr/local/share/ca-certificates "$root/usr/local/share/"
git clone -q --no-hardlinks "$checkout" "$root/root/hvd_elastic"

# Runs a command in the release, with none of this machine's settings but those of its network.
inside() {
    unshare --mount --pid --fork --kill-child sh -c '
        set -e
        root=$1
        shift
        mount --make-rprivate /
        mount --bind "$root" "$root"  # virtual hosts make namespaces, which need / to be a mount
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/dev/shm"
        mount -t proc proc "$root/proc"
        mount --rbind /sys "$root/sys"
        mount -t tmpfs tmpfs "$root/run"
        exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 USER=root \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
            ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
            sh -c "cd /root/hvd_elastic && $1"
    ' inside "$root" "$1"
}

inside update-ca-certificates >>"$log" 2>&1
status=0
for command in "$@"; do
    began=$(date +%s)
    echo "$release: $command"
    inside "$command" || status=$?
    echo "$release: $command: $([ $status = 0 ] && echo succeeded || echo "failed with status $status") after $((($(date +%s) - began) / 60)) minutes"
    [ $status = 0 ] || break
done
inside '
    . /etc/os-release
    [ "$ID" != debian ] || PRETTY_NAME="Debian $(cat /etc/debian_version)"
    printf "%s: %s, " "$(date +%F)" "$PRETTY_NAME"
    python3 --version
    gcc --version | head -n 1
    cmake --version | head -n 1
    mpirun --version | head -n 1
    .venv/bin/pip list 2>/dev/null | grep -iE "^(torch|tensorflow[-_]cpu|keras|numpy|horovod) "
' 2>/dev/null || true
if [ $status != 0 ]; then
    trap - EXIT
    echo "The folder is kept to look into it: $root"
fi
exit $status

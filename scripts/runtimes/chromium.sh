# A page whose script builds objects, draws and makes paragraphs.
directory=$(mktemp -d)
HOME=$directory chromium --headless --disable-gpu --disable-dev-shm-usage --user-data-dir="$directory/data" --virtual-time-budget=1000 \
    --timeout=300000 --dump-dom "$@" 2>/dev/null | grep '^sums'
rm -rf "$directory"

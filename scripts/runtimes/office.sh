# A table is converted to a workbook and back.
directory=$(mktemp -d)
export HOME=$directory
for i in $(seq 40000); do echo "$i,$((i * i)),$((i % 7))"; done >"$directory/table.csv"
soffice --headless --convert-to xlsx:"Calc MS Excel 2007 XML" --outdir "$directory" "$directory/table.csv" >/dev/null 2>&1
soffice --headless --convert-to csv:"Text - txt - csv (StarCalc)" --outdir "$directory/back" "$directory/table.xlsx" >/dev/null 2>&1
sha256sum <"$directory/back/table.csv"
rm -rf "$directory"

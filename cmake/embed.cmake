# cmake -DOUT=assets.cc -DHEADER=lockstep/page/assets.h -DNAMESPACE=lockstep::assets -DFILES=a.html;b.js -P embed.cmake
# Writes a source that defines the contents of each file: page.html as kPageHtml.
set(text "#include \"${HEADER}\"\n\nnamespace ${NAMESPACE} {\n\n")
foreach(file ${FILES})
  get_filename_component(base ${file} NAME)
  string(REGEX REPLACE "[._]" ";" words ${base})
  set(name k)
  foreach(word ${words})
    string(SUBSTRING ${word} 0 1 first)
    string(SUBSTRING ${word} 1 -1 rest)
    string(TOUPPER ${first} first)
    string(APPEND name ${first}${rest})
  endforeach()
  # As bytes: no text of the file can then mean something to the compiler or to CMake.
  file(READ ${file} bytes HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
  string(APPEND text "namespace {\nconstexpr char ${name}Bytes[] = {${bytes}};\n}\n"
    "const std::string_view ${name}(${name}Bytes, sizeof ${name}Bytes);\n\n")
endforeach()
string(APPEND text "}  // namespace ${NAMESPACE}\n")
file(WRITE ${OUT} "${text}")
